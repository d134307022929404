"""Runs a machine's agent, one for each node of a run::

    torchrun --rdzv-backend sluice --nproc-per-node 1 --max-restarts 0 -m sluice.node CONFIG [--name NAME] [key=value ...]

The node with the address `services.coordinator.host` runs the coordinator, as `sluice train` does; the other nodes follow it.
If that node is lost, `services.coordinator.standby` runs the next coordinator. Exit codes are those of `sluice`; torchrun
turns every code but 0 into 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from msgspec.structs import replace
from rich.console import Console

from launcher import run_folder
from launcher.cli import run_and_report
from launcher.commands.train import run_training
from launcher.node.agent import Agent, CoordinatorKeeper
from launcher.node.local_node import LocalNode, check_secret, on_this_machine
from launcher.node.supervisor import Supervisor
from launcher.node.topology import coordinator_spec, machine_faults
from launcher.view import View
from runtime import run_files, timeouts
from runtime.cluster.nodes import name_fault
from runtime.config import Config, loading
from runtime.errors import ConfigError, Forbidden, ServiceFault, UserError
from runtime.process import network, os_process
from runtime.process.os_process import CommandParser, ending_signals
from runtime.process.waiting import done_within
from services.rpc import client
from sluice import start

# Variables that torchrun gives its worker. This node's own groups must not take them for theirs.
_OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")


class WorkerNode:
    """A node without the coordinator."""

    def __init__(self, config: Config, here: LocalNode, verbose: bool):
        """Prepare the node's agent. Raises UserError."""
        check_secret(config)
        own = on_this_machine(config, here.address)
        settings = config.services.coordinator
        self._deadlines = config.deadlines
        self._here = here
        self._view = View(Console(), verbose=verbose)
        self._supervisor = Supervisor(Path(config.run.dir) / run_files.LOGS, self._view, config.logs)
        node, address = here.registration(config, own), network.host_port(settings.host, settings.port)
        self._agent = Agent(node, own, address, self._supervisor, here.machine, sys.executable)
        self._own_address = network.host_port(node.address, settings.port)
        self._coordinator = CoordinatorKeeper(self._supervisor)
        self._interrupted = asyncio.Event()  # this node was asked to end
        self._stopping = asyncio.Event()  # the whole run ends

    async def run(self) -> None:
        """Run until the run ends or this node is asked to leave it; end all processes. Raises UserError, ServiceFault."""
        for number in ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._interrupted.set)
        lives: list[Coroutine[Any, Any, None]] = [self._agent.follow(), self._deaths(), self._course(), self._leaves()]
        if self._agent.config.services.coordinator.standby == self._here.name:
            lives.append(self._stand_by())
        works = {asyncio.create_task(life) for life in lives}
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            await self._supervisor.end_all(timeouts.FAILED_GRACE)

    async def _leaves(self) -> None:
        """Wait until this node is asked to end. If all nodes end, stay while the run saves with the processes here."""
        await self._interrupted.wait()
        self._coordinator.terminate()
        # A coordinator that was started here has to begin before it can announce the end.
        if self._coordinator.child is not None or await done_within(self._stopping.wait(), timeouts.LEAVE_NOTICE):
            await asyncio.sleep(max(timeouts.INTERRUPTED_GRACE, self._deadlines.stop))

    async def _deaths(self) -> None:
        """Report each process that dies and is not replaced; the coordinator decides what follows."""
        while True:
            child = await self._supervisor.first_failure()
            self._supervisor.let_go(child)
            self._agent.report(child)

    async def _course(self) -> None:
        """Wait until the run has ended, and this node's processes with it. Raises ServiceFault if the run failed."""
        if await self._last_phase() == "failed":
            raise ServiceFault("coordinator", "run", "the run failed; the coordinator's node and its log say why")
        await self._supervisor.finish(self._deadlines.stop)

    async def _stand_by(self) -> None:
        """Start the next coordinator once the node that leads the run is lost, and lead the run to its end."""
        folder = Path(self._agent.config.run.dir)
        lock: IO[bytes] | None = None
        # The leader holds the lock of the run's folder; this node gets it once the leader is lost.
        while lock is None:
            await asyncio.sleep(timeouts.AGENT_RETRY)
            if self._agent.began:
                lock = await asyncio.to_thread(run_folder.inherited, folder)
        with lock:
            self._view.say(f"the coordinator's node is lost: {self._here.name} leads the run, at {self._own_address}")
            config, where, machine = self._agent.config, ("--address", self._own_address), self._here.machine
            spec = coordinator_spec(config, self._agent.path, sys.executable, where, time.monotonic(), True, machine)
            former = len(list((folder / run_files.LOGS).glob("coordinator*.log")))  # so that former logs stay
            await self._coordinator.start(spec, incarnation=former)
            # Waits for the run's end, across restarts of the coordinator. This node's other processes end after that.
            await self._coordinator.until_finished(spec, config.services.coordinator.restarts)
            await self._supervisor.finish(self._deadlines.stop)

    async def _last_phase(self) -> str:
        """Apply the run's progress until its end, and return its last phase. Connections may break: `follow` limits that."""
        phase = ""
        while True:
            with suppress(ServiceFault, Forbidden):  # no coordinator yet, or this node has not read its secret
                async for progress in client.watch(self._agent.coordinator, self._deadlines.keepalive, self._agent.keys):
                    if self._coordinator.child is not None:
                        self._view.progress(progress)
                    elif progress.phase != phase:
                        phase = progress.phase
                        self._view.say(f"the run, led at {self._agent.coordinator}: {phase}")
                    if progress.phase in ("finished", "failed"):
                        return progress.phase
                    self._agent.apply_progress(progress)
                    if progress.stopping:
                        self._stopping.set()
            await asyncio.sleep(timeouts.AGENT_RETRY)


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m sluice.node", description="Run one node of a cluster.")
    parser.add_argument("config", type=Path, help="a YAML file, the same on every node")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="the same on every node")
    parser.add_argument("--name", default="", help="what cluster.nodes calls this node (default: its host name)")
    parser.add_argument("--address", default="", metavar="IP", help="this node's, instead of what network.interface gives")
    parser.add_argument("--devices", type=int, metavar="N", help="how many of its accelerators are for the run (default: all)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what each process of this node writes to its log")
    return parser


def main() -> None:
    options = _parser().parse_intermixed_args()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("MASTER_ADDR") != start.RENDEZVOUS:
        warning = "this torchrun opened a store on every address, and may unpickle what is put there"
        sys.stderr.write(f"warning: {warning}: --rdzv-backend {start.RENDEZVOUS} opens none\n")
    for variable in [name for name in os.environ if name.startswith(_OF_TORCHRUN)]:
        del os.environ[variable]
    sys.exit(run_and_report(lambda: run_node(options)))


def run_node(options: argparse.Namespace) -> None:
    """Run this node to its end. Raises SluiceError."""
    os_process.close_to_others()
    config = loading.resolve(loading.load(options.config, options.overrides))
    here = LocalNode.of(config, options.name, options.address, options.devices)
    if fault := name_fault(config.cluster, here.name):
        raise UserError(fault)
    coordinator = config.services.coordinator
    led = bool(coordinator.standby) and run_folder.under_way(Path(config.run.dir))
    if not led and (not coordinator.host or network.is_own(coordinator.host)):
        run_training(config, replace(here, echo=timeouts.SIGNAL_ECHO), options.verbose)
        return
    if not coordinator.port:
        raise UserError("services.coordinator.port: 0 is any free port, on one node; on several it must be named")
    if faults := list(machine_faults(config, here.machine)):
        raise ConfigError(faults)
    asyncio.run(WorkerNode(config, here, options.verbose).run())


if __name__ == "__main__":
    main()
