"""Whole runs over several nodes: torchrun with the agent in each, as a user starts it, and what each of them says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.system import namespaces
from tests.system.namespaces import Network, Node
from tests.system.runs import ROOT, Live, steps

NAMES = ("first", "second", "third")
PORT = 7077  # the coordinator's: in a namespace all ports are free
TORCHRUN = ("--rdzv-backend", "sluice", "--nproc-per-node", "1", "--max-restarts", "0", "--log-dir", os.devnull)
AGENT = ("-m", "torch.distributed.run", *TORCHRUN, "-m", "sluice.node")

# What a shell that is itself within a torchrun would hand on, which the agents must not take for theirs.
OUTER = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.99", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "outer"}


@dataclass
class Cluster:
    """Nodes by name, the agents that were started on them, and the run's folder, which all share; but for `own`: of these
    folders, which exist, each node has one of its own, and `folder` is the first one's."""

    network: Network
    config: Path
    overrides: Sequence[str]
    folder: Path
    own: Sequence[Path] = ()
    modules: Path = ROOT
    agents: dict[str, Live] = field(default_factory=dict)

    def node(self, name: str) -> Node:
        return self.network.nodes[NAMES.index(name)]

    @property
    def run(self) -> Live:
        """As the coordinator's node sees it."""
        return self.agents[NAMES[0]]

    def start(self, name: str, torchrun: bool = True) -> Live:
        """The agent of a node, again if there was one. Without `torchrun` its exit code is its own."""
        console = self.folder.with_name(f"{self.folder.name}.{name}.console")
        modules = os.pathsep.join((str(self.modules), str(ROOT)))
        env = {**(OUTER if torchrun else {}), "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": modules, "COLUMNS": "200"}
        command = (sys.executable, *(AGENT if torchrun else AGENT[-2:]), str(self.config), "--name", name, *self.overrides)
        if self.own:  # what is mounted in a namespace of `ip netns exec` is seen there alone
            mounts = " && ".join(f"mount --bind {self.place(name, path)} {path}" for path in self.own)
            command = ("sh", "-c", f'{mounts} && exec "$@"', "sh", *command)
        with console.open("w") as out, console.with_suffix(".err").open("w") as err:
            process = self.node(name).start(command, env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self.agents[name] = Live(process, self.folder, console)
        return self.agents[name]

    def place(self, name: str, path: Path) -> Path:
        """Where this machine has what node `name` sees at `path`, one of its own folders."""
        return _place(name, path)

    def said(self) -> str:
        """What every agent printed."""
        return "\n".join(f"{name}: {live.output}{live.errors}" for name, live in self.agents.items())

    def steps(self) -> int:
        """Done so far."""
        assert self.run.process.poll() is None, self.said()
        return self.run.steps()

    def serving(self) -> int:
        """How many rollouts served in the newest step."""
        done = steps(self.folder) if (self.folder / "metrics.jsonl").exists() else []
        return int(done[-1]["rollout/serving"]) if done else 0

    def lost(self) -> list[str]:
        """The rollouts that were given up, in this order."""
        return re.findall(r"WARNING (\S+) \(incarnation \d+\) is lost: ", self.log("coordinator"))

    def registered(self) -> list[tuple[str, str]]:
        """(name, address) of every process, in the order in which they came."""
        return re.findall(r" (\S+) registered: pid \d+ at \[?([\d.]+|[\da-f:]+)\]?:\d+,", self.log("coordinator"))

    def where(self, name: str) -> list[str]:
        """The addresses at which processes called `name` registered, in this order."""
        return [address for one, address in self.registered() if one == name]

    def pids(self, name: str) -> list[int]:
        """Of the processes called `name` that registered, in this order. Nodes share their pids."""
        return [int(pid) for pid in re.findall(rf" {name} registered: pid (\d+) at", self.log("coordinator"))]

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""


def _place(name: str, path: Path) -> Path:
    return path.with_name(f"{path.name}.{name}")


@contextmanager
def cluster(
    config: Path,
    *overrides: str,
    folder: Path,
    count: int = 3,
    start: int | None = None,
    network: str = namespaces.NETWORK,
    own: Sequence[Path] = (),
    modules: Path = ROOT,
) -> Iterator[Cluster]:
    """A run over `count` nodes, on the first `start` of which an agent is started at once; nothing of it stays. `own`: as in
    Cluster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with namespaces.joined(count, network) as made_of:
        first = made_of.nodes[0].address
        where = (f"run.dir={folder}", f"services.coordinator.host={first}", f"services.coordinator.port={PORT}")
        seen = _place(NAMES[0], folder) if folder in own else folder
        made = Cluster(made_of, config, (*where, "network.interface=auto", *overrides), seen, own, modules)
        for name in NAMES[: count if start is None else start]:
            made.start(name)
        yield made
