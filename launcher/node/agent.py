"""A node's end of the coordinator's word: what is to run here is started, and what is not any more is ended."""

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
from launcher.node.child import Child
from launcher.node.local_node import Machine
from launcher.node.supervisor import Supervisor
from launcher.node.topology import ProcessSpec
from runtime import run_files, timeouts
from runtime.cluster.nodes import Assignment, Death, Launch, NodePaths, NodeRegistration, code
from runtime.cluster.placement import RestartBackoff
from runtime.cluster.topology import named_paths, shares_devices, warm_up_seconds
from runtime.config import Config, Restarts, loading
from runtime.errors import ConfigError, Forbidden, ServiceFault, UserError
from runtime.ledger import node_checkpoints
from runtime.process import disk, keys
from runtime.process.keys import Keys
from runtime.status import Progress
from services.rpc import client, contract

# ---- Coordinator
#
# The coordinator as a child of the node that leads the run: in place of one that is killed another comes, which takes up
# what lives.


class CoordinatorKeeper:
    """Of the newest coordinator that this node has started, `child`; None before there is one."""

    def __init__(self, supervisor: Supervisor):
        self.child: Child | None = None
        self._supervisor = supervisor
        self._stopping = False

    async def start(self, spec: ProcessSpec, pass_fds: Sequence[int] = (), incarnation: int = 0) -> Child:
        self.child = await self._supervisor.start(spec, pass_fds=pass_fds, incarnation=incarnation)
        if self._stopping:
            self.terminate()
        return self.child

    async def until_finished(self, again: ProcessSpec, restarts: Restarts) -> None:
        """`again`: how another is started. Raises the fault of one that fails, or is killed when `restarts` allow no further
        start."""
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
        """The run is to save and to end; if the coordinator is away, the next one is told."""
        self._stopping = self._supervisor.stopping = True
        if self.child is not None:
            self.child.signal_group(signal.SIGTERM)  # which is kept for one that still begins


JOIN = contract.METHODS["Coordinator", "Join"]


class Agent:
    """Of one node. `follow` is its life; the processes are the supervisor's."""

    def __init__(
        self,
        node: NodeRegistration,
        config: Config,
        coordinator: str,
        supervisor: Supervisor,
        machine: Machine,
        python: str,
    ):
        """`config`: what this node was started with, before the coordinator says it in full."""
        self._node = node
        self._own = self.config = config
        """As the coordinator said it last."""
        self.coordinator = coordinator
        """The newest one's address."""
        self._supervisor = supervisor
        self._machine, self._python = machine, python
        self.path = Path(config.run.dir) / run_files.NODES / f"{node.name}.yaml"
        """The configuration as this node's processes read it."""
        self.keys: Keys | None = None
        """Its own, once it has looked for the run's secret."""
        self._assignment = Assignment(config="")
        self.began = False
        """Whether the run is under way."""
        self._reports: set[asyncio.Task[None]] = set()
        supervisor.on_exit = self.report

    async def follow(self) -> None:
        """Until cancelled. Raises UserError when the coordinator refuses the node, ServiceFault when it is not to be reached
        for `deadlines.start` seconds at first, and those of a warm-up, and `deadlines.coordinator` once something runs here."""
        loop = asyncio.get_running_loop()
        reached, said = loop.time(), False
        while True:
            deadlines = self.config.deadlines
            timeout = deadlines.coordinator if self._assignment.launches else deadlines.start + warm_up_seconds(self._own)
            try:
                await asyncio.to_thread(self.look_for_keys)
                async with client.Channel(self.coordinator, self.keys, silence=deadlines.silence) as channel:
                    patience = min(max(0.0, reached + timeout - loop.time()), timeouts.CONTROL_CALL)
                    await channel.ready("coordinator", patience)  # which may have become another's, or have another secret
                    refused = False
                    try:
                        await self._obey(channel)
                    except Forbidden:
                        refused = True
                        raise
                    finally:
                        reached = reached if refused else loop.time()
            except (ServiceFault, Forbidden) as error:
                if loop.time() + timeouts.AGENT_RETRY >= reached + timeout:
                    message = f"not to be reached at {self.coordinator} from node {self._node.name}: {error}"
                    raise ServiceFault("coordinator", "join", message, timeout) from error
                if not (said or self._assignment.config):
                    said = True
                    self._supervisor.say(f"waits for the coordinator at {self.coordinator}, {timeout:g} s at most")
            await asyncio.sleep(timeouts.AGENT_RETRY)
            if self.config.services.coordinator.standby:
                with suppress(OSError):  # it is away too, for as long as there is none
                    told = await asyncio.to_thread((Path(self.config.run.dir) / run_files.ADDRESS).read_text)
                    self.coordinator = told or self.coordinator

    def look_for_keys(self) -> None:
        """Each start of a run has a secret of its own. Raises Forbidden where it is not known, UserError for what is none."""
        secret, party = keys.known(Path(self._own.run.dir)), keys.node_agent(self._node.name)
        if self.keys is None or self.keys.secret != secret:
            self.keys = self._supervisor.keys = keys.holder(self._own.network, party, secret)

    def apply_progress(self, progress: Progress) -> None:
        """What the run's progress means for this node's processes: once it is under way those that die are replaced, and those
        that it does without are ended."""
        self._supervisor.stopping |= progress.stopping
        if not self.began and progress.phase != "starting":
            self.began = True
            self._replace()
        for loss in progress.lost:
            self._supervisor.give_up(loss.name, loss.incarnation, loss.reason)

    def _replace(self) -> None:
        launches = self._assignment.launches
        elsewhere = [one.name for one in launches if one.rendezvous is not None or shares_devices(self.config, one.role)]
        self._supervisor.enable_restarts(topology.restarts(self.config, launches), elsewhere)

    def report(self, child: Child) -> None:
        """Tell the coordinator that a process died, and comes not again by itself."""
        fault = child.fault()
        death = Death(
            node=self._node.name,
            name=child.spec.name,
            incarnation=child.incarnation,
            reason=str(fault),
            mistake=isinstance(fault, UserError),
        )
        task = asyncio.create_task(self._report(death))
        self._reports.add(task)
        task.add_done_callback(self._reported)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._reports.discard(task)
        if not task.cancelled():
            task.exception()  # a coordinator that cannot be told loses sight of the whole node

    async def _report(self, death: Death) -> None:
        async with client.Channel(self.coordinator, self.keys) as channel:
            method = contract.METHODS["Coordinator", "ReportDeath"]
            await client.call(channel, "coordinator", method, death, self.config.deadlines.coordinator)

    async def _obey(self, channel: client.Channel) -> None:
        """Until the stream ends."""
        told_paths, launches = False, [launch.name for launch in self._assignment.launches]
        running = {name: number for name, number in self._supervisor.incarnations.items() if name in launches}
        node = replace(self._node, running=running)
        async with aclosing(client.items(channel, "coordinator", JOIN, node)) as assignments:
            async for assignment in assignments:
                await disk.done(partial(self._read, assignment), self.path, self._supervisor.say)
                if assignment.run != self._assignment.run:
                    await self._forget(assignment)
                if told_paths:
                    await self._apply(assignment)
                else:
                    told_paths = True
                    await self._tell_paths(channel)

    async def _forget(self, assignment: Assignment) -> None:
        """All begin anew: the coordinator does not know what ran for the one before."""
        self._supervisor.stop_restarts()
        await asyncio.gather(
            *(self._supervisor.end(launch.name, timeouts.AGENT_END_GRACE) for launch in self._assignment.launches)
        )
        self._assignment, self.began = replace(assignment, launches=[]), False

    def _read(self, assignment: Assignment) -> None:
        """Write the configuration as this node's processes are to read it: the address is the node's own."""
        run_files.make(Path(self._own.run.dir))
        for folder in (self.path.parent, Path(self._own.run.dir) / run_files.LOGS):
            folder.mkdir(parents=True, exist_ok=True)
        told = self.path.with_suffix(".told")  # a process that is started again may read the other one at any time
        run_files.write_private(told, assignment.config)
        config = loading.load(told, ())
        told.unlink()
        own, others = code(self._own), code(config)
        if differing := [key for key in own | others if own.get(key) != others.get(key)]:
            said = "the coordinator says something else than this node was started with; must be the same"
            raise ConfigError([f"{key}: {said}" for key in differing])
        self.config = replace(config, network=replace(config.network, interface=self._node.address))
        run_files.write_private(self.path, loading.to_yaml(self.config))

    async def _tell_paths(self, channel: client.Channel) -> None:
        run_dir, whole = Path(self.config.run.dir), list[str]()
        files = {key: Path(path) for key, path in named_paths(self.config).items()} | {"run.dir": run_dir / run_files.LOCK}
        if not self.config.cluster.shared_folder:
            del files["run.dir"]  # each has its own
            whole = await asyncio.to_thread(node_checkpoints.whole, run_dir, self._node.name, not self.began)
        found = await asyncio.to_thread(lambda: {key: fingerprint(path) for key, path in files.items()})
        method = contract.METHODS["Coordinator", "ReportPaths"]
        await client.call(channel, "coordinator", method, NodePaths(node=self._node.name, found=found, parts=whole))

    async def _apply(self, assignment: Assignment) -> None:
        wanted = {launch.name: launch for launch in assignment.launches}
        specs = topology.service_specs(
            self.config,
            assignment.launches,
            self.path,
            self._python,
            self.coordinator,
            len(os.sched_getaffinity(0)),
            self._machine,
        )
        running = self._supervisor.incarnations
        former = [launch.name for launch in self._assignment.launches]
        ends = [name for name in former if name not in wanted or running.get(name, 0) < wanted[name].incarnation]
        await asyncio.gather(*(self._supervisor.end(name, timeouts.AGENT_END_GRACE) for name in ends))
        self._assignment = assignment
        self._supervisor.respecify(specs)  # those that run, and are started again later, find the coordinator of now
        for name in sorted(wanted, key=lambda name: specs[name].role != "trainer"):  # the trainer loads the longest
            if name not in running:
                await self._start(specs[name], wanted[name])
        if self.began:
            self._replace()

    async def _start(self, spec: topology.ProcessSpec, launch: Launch) -> None:
        try:
            await self._supervisor.start(spec, incarnation=launch.incarnation)
        except UserError as error:
            name, incarnation = launch.name, launch.incarnation
            await self._report(Death(node=self._node.name, name=name, incarnation=incarnation, reason=str(error), mistake=True))
            raise


WHOLE = 1 << 20  # bytes up to which a file is read as a whole; of a larger one as many at its beginning and its end


def fingerprint(path: Path) -> str:
    """A hash of a file, or of a folder's files with their names; "" where there is nothing.

    What is hidden does not count: a download keeps there when it was made.
    """
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
