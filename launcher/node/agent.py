"""A node's side of the coordinator's assignments: starts what is to run on this node, and ends what is not to run any more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import xxhash
from msgspec.structs import replace

from launcher.node import topology
from launcher.node.local_node import Machine
from launcher.node.ranks import RanksOrder
from launcher.node.supervisor import Child, Supervisor
from launcher.node.topology import ProcessSpec
from runtime import run_files, timeouts
from runtime.blobs import ADDRESS
from runtime.cluster.nodes import Assignment, Death, Launch, NodePaths, NodeRegistration, code
from runtime.cluster.placement import RestartBackoff
from runtime.cluster.topology import UPDATED, named_paths, warm_up_seconds
from runtime.config import Config, loading
from runtime.errors import ConfigError, Forbidden, ServiceFault, SluiceError, UserError
from runtime.ledger import checkpoint
from runtime.process import keys, os_process, waiting
from runtime.process.keys import Keys
from runtime.process.network import host_port
from runtime.status import Progress
from services.blobs import BlobServer
from services.rpc import client, contract


class CoordinatorKeeper:
    """Keeps the coordinator alive on the node that leads the run: if it is killed, a new one takes over the living processes.
    `child`: the newest coordinator; None before the first start."""

    def __init__(self, supervisor: Supervisor):
        self.child: Child | None = None
        self._supervisor = supervisor
        self._stopping = False

    async def start(self, spec: ProcessSpec, pass_fds: Sequence[int] = (), incarnation: int = 0) -> Child:
        self.child = await self._supervisor.start(spec, pass_fds=pass_fds, incarnation=incarnation)
        if self._stopping:
            self.terminate()
        return self.child

    async def until_finished(self, again: ProcessSpec, restarts: int) -> None:
        """Wait until the coordinator has ended well; start it again with `again` if it is killed. Raises its fault if it fails,
        or is killed when `restarts` allow no further start."""
        assert self.child is not None
        self._supervisor.followed = (again.name,)
        allowance = RestartBackoff(restarts)
        while code := await self.child.process.wait():
            former, fault = self.child, self.child.fault()
            delay = allowance.delay(time.monotonic()) if code < 0 else None
            if delay is None:
                raise fault
            self._supervisor.say(f"{fault}; started again in {delay:g} s")
            self._supervisor.let_go(former)
            await asyncio.sleep(delay)
            await self.start(again, incarnation=former.incarnation + 1)

    def terminate(self) -> None:
        """Ask the run to save and to end. If the coordinator is away, the next one gets the signal."""
        self._stopping = self._supervisor.stopping = True
        if self.child is not None:
            self.child.signal_group(signal.SIGTERM)  # a coordinator that still starts keeps the signal


class Agent:
    """The agent of one node. Its task is `follow`; the supervisor has the processes."""

    def __init__(
        self, node: NodeRegistration, config: Config, coordinator: str, supervisor: Supervisor, machine: Machine, python: str
    ):
        """Start with `config`, the configuration of this node's command line; the coordinator sends the full one later."""
        self._node = node
        self._own = self.config = config  # the configuration that the coordinator sent last
        self.coordinator = coordinator  # the address of the newest coordinator
        self._supervisor = supervisor
        self._machine, self._python = machine, python
        self.path = Path(config.run.dir) / run_files.NODES / f"{node.name}.yaml"  # the configuration for this node's processes
        self.keys: Keys | None = None  # this node's keys, once it has read the run's secret
        self._blobs = BlobServer(node.name, config.cluster.blob_bytes) if config.moe.router_replay == "routing" else None
        self._assignment = Assignment(config="")
        self.began = False  # whether the run is under way
        self._reports: set[asyncio.Task[None]] = set()
        supervisor.on_exit = self.report

    async def follow(self) -> None:
        """Follow the coordinator's assignments until cancelled. Raises UserError if the coordinator refuses the node.

        Raises ServiceFault if the coordinator cannot be reached for `deadlines.coordinator` seconds once something runs here;
        before that the limit is `deadlines.start` and the seconds of a warm-up."""
        try:
            await self._follow()
        finally:
            if self._blobs is not None:
                await self._blobs.close()

    async def _follow(self) -> None:
        # Each turn of the loop is one connection. It ends with the stream of assignments, or by an error.
        loop = asyncio.get_running_loop()
        reached, said = loop.time(), False
        while True:
            deadlines = self.config.deadlines
            timeout = deadlines.coordinator if self._assignment.launches else deadlines.start + warm_up_seconds(self._own)
            try:
                await asyncio.to_thread(self.look_for_keys)
                if self._blobs is not None:
                    self._node = replace(self._node, blobs=await self._blobs.open(self._own, self.keys))
                async with client.Channel(self.coordinator, self.keys, silence=deadlines.keepalive) as channel:
                    patience = min(max(0.0, reached + timeout - loop.time()), timeouts.CONTROL_CALL)
                    await channel.ready("coordinator", patience)  # at the address may be another process, or another secret
                    refused = False
                    try:
                        await self._obey(channel)  # returns once the stream ends, as when the coordinator dies
                    except Forbidden:
                        refused = True
                        raise
                    finally:
                        reached = reached if refused else loop.time()
            except (ServiceFault, Forbidden) as error:
                if loop.time() + timeouts.AGENT_RETRY >= reached + timeout:
                    message = f"cannot be reached at {self.coordinator} from node {self._node.name}: {error}"
                    raise ServiceFault("coordinator", "join", message, timeout) from error
                if not (said or self._assignment.config):
                    said = True
                    self._supervisor.say(f"waits for the coordinator at {self.coordinator}, {timeout:g} s at most")
            await asyncio.sleep(timeouts.AGENT_RETRY)
            if self.config.services.coordinator.standby:
                folder = Path(self.config.run.dir)
                self.coordinator = await asyncio.to_thread(run_files.coordinator_address, folder, self.coordinator)

    def look_for_keys(self) -> None:
        """Read the run's secret, which each start of a run makes anew. Raises Forbidden if it is unknown, UserError if bad."""
        secret, party = keys.known(Path(self._own.run.dir)), keys.node_agent(self._node.name)
        if self.keys is None or self.keys.secret != secret:
            self.keys = self._supervisor.keys = keys.holder(self._own.network, party, secret)

    def apply_progress(self, progress: Progress) -> None:
        """Apply the run's progress: once it is under way, replace processes that die; end those that the run does without."""
        self._supervisor.stopping |= progress.stopping
        if self._blobs is not None:
            self._blobs.store.expire(progress.step)
        if not self.began and progress.phase != "starting":
            self.began = True
            self._replace()
        for loss in progress.lost:
            self._supervisor.give_up(loss.name, loss.incarnation, loss.reason)

    def _replace(self) -> None:
        launches = self._assignment.launches
        elsewhere = [one.name for one in launches if one.rendezvous is not None or one.role in UPDATED]
        self._supervisor.enable_restarts(topology.restarts(self.config, launches), elsewhere)

    def report(self, child: Child) -> None:
        """Report to the coordinator that a process died and is not restarted by this node."""
        task = asyncio.create_task(self._report(child.spec.name, child.incarnation, child.fault()))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _report(self, name: str, incarnation: int, fault: SluiceError) -> None:
        mistake = isinstance(fault, UserError)
        death = Death(node=self._node.name, name=name, incarnation=incarnation, reason=str(fault), mistake=mistake)
        method = contract.METHODS["Coordinator", "ReportDeath"]
        with suppress(SluiceError):  # that coordinator loses the whole node
            async with client.Channel(self.coordinator, self.keys) as channel:
                await client.call(channel, "coordinator", method, death, self.config.deadlines.coordinator)

    async def _obey(self, channel: client.Channel) -> None:
        """Apply each assignment until the stream ends."""
        reported, launches = False, [launch.name for launch in self._assignment.launches]
        running = {name: number for name, number in self._supervisor.incarnations.items() if name in launches}
        node = replace(self._node, running=running)
        joined = client.items(channel, "coordinator", contract.METHODS["Coordinator", "Join"], node)
        async with aclosing(joined) as assignments:
            async for assignment in assignments:
                # In a thread, and again while the disk fails: the processes started below read this file.
                await waiting.done(partial(self._read, assignment), self.path, self._supervisor.say)
                if assignment.run != self._assignment.run:
                    await self._forget(assignment)  # the former run's processes have ended after this
                if reported:
                    await self._apply(assignment)
                else:  # the first assignment has no launches: they follow once this node has reported its paths
                    reported = True
                    await self._report_paths(channel)

    async def _forget(self, assignment: Assignment) -> None:
        """End all processes of the former run: the coordinator of the new run does not know them."""
        self._supervisor.stop_restarts()
        ends = (self._supervisor.end(launch.name, timeouts.AGENT_END_GRACE) for launch in self._assignment.launches)
        await asyncio.gather(*ends)
        if self._blobs is not None:
            self._blobs.store.clear()
        self._assignment, self.began = replace(assignment, launches=[]), False

    def _read(self, assignment: Assignment) -> None:
        """Write the configuration for this node's processes, with the node's own address as the interface."""
        run_files.make(Path(self._own.run.dir))
        for folder in (self.path.parent, Path(self._own.run.dir) / run_files.LOGS):
            folder.mkdir(parents=True, exist_ok=True)
        received = self.path.with_suffix(".received")  # a restarted process may read `path` at any time
        run_files.write_private(received, assignment.config)
        config = loading.load(received, ())
        received.unlink()
        own, others = code(self._own), code(config)
        if differing := [key for key in own | others if own.get(key) != others.get(key)]:
            fault = "the coordinator's value is not this node's; must be the same"
            raise ConfigError([f"{key}: {fault}" for key in differing])
        self.config = replace(config, network=replace(config.network, interface=self._node.address))
        run_files.write_private(self.path, loading.to_yaml(self.config))

    async def _report_paths(self, channel: client.Channel) -> None:
        run_dir, whole = Path(self.config.run.dir), list[str]()
        files = {key: Path(path) for key, path in named_paths(self.config).items()} | {"run.dir": run_dir / run_files.LOCK}
        if not self.config.cluster.shared_folder:
            del files["run.dir"]  # each node has its own
            whole = await asyncio.to_thread(checkpoint.whole_parts, run_dir, self._node.name, not self.began)
        found = await asyncio.to_thread(lambda: {key: fingerprint(path) for key, path in files.items()})
        method = contract.METHODS["Coordinator", "ReportPaths"]
        await client.call(channel, "coordinator", method, NodePaths(node=self._node.name, found=found, parts=whole))

    async def _apply(self, assignment: Assignment) -> None:
        wanted = {launch.name: launch for launch in assignment.launches}
        cores, config, launches = len(os.sched_getaffinity(0)), self.config, assignment.launches
        specs = topology.service_specs(config, launches, self.path, self._python, self.coordinator, cores, self._machine)
        if self._blobs is not None:
            self._blobs.peer = assignment.peer
            specs = {name: replace(spec, env={**spec.env, ADDRESS: self._node.blobs}) for name, spec in specs.items()}
        running = self._supervisor.incarnations
        former = [launch.name for launch in self._assignment.launches]
        behind = [name for name in former if name in wanted and running.get(name, 0) < wanted[name].incarnation]
        parents = {name: parent for name in behind if (parent := self._supervisor.outlives(name)) is not None}
        ends = [name for name in former if name not in wanted] + [name for name in behind if name not in parents]
        await asyncio.gather(*(self._supervisor.end(name, timeouts.AGENT_END_GRACE) for name in ends))
        self._assignment = assignment
        self._supervisor.respecify(specs)  # a process that restarts later finds the present coordinator
        for name, parent in parents.items():
            launch, world = wanted[name], getattr(config.services, wanted[name].role).processes
            order = RanksOrder(incarnation=launch.incarnation, ranks=launch.ranks, world=world)
            if (meeting := launch.rendezvous) is not None:
                order.at, order.env = host_port(meeting.host, meeting.port), {os_process.STORE_KEY: meeting.key.hex()}
            self._supervisor.start_ranks(parent, order)
        for name in sorted(wanted, key=lambda name: specs[name].role != "trainer"):  # the trainer loads the longest
            if name not in running:
                await self._start(specs[name], wanted[name])
        if self.began:
            self._replace()

    async def _start(self, spec: topology.ProcessSpec, launch: Launch) -> None:
        try:
            await self._supervisor.start(spec, incarnation=launch.incarnation)
        except UserError as error:
            await self._report(launch.name, launch.incarnation, error)
            raise


WHOLE = 1 << 20  # bytes up to which a whole file is read; of a larger file, so many at its beginning and at its end


def fingerprint(path: Path) -> str:
    """Return a hash of a file, or of a folder's files, with their names, that are not hidden; "" if there is no such path."""
    digest = xxhash.xxh3_64()
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                name = str(file.relative_to(path))
                if file.is_file() and "/." not in f"/{name}":
                    digest.update(name.encode())
                    _add(digest, file)
        else:
            _add(digest, path)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_64, file: Path) -> None:
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as content:
        digest.update(content.read(WHOLE))
        if size > WHOLE:
            content.seek(max(WHOLE, size - WHOLE))
            digest.update(content.read(WHOLE))
