"""`make cluster-demo`: configs/cluster.yaml over three network namespaces, with faults, and what they led to.

Takes root. Prints where everything runs, then a line for each event with the seconds until the run had got over it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.system.cluster import NAMES, Cluster, cluster
from tests.system.namespaces import why_not
from tests.system.runs import ROOT, eventually

CONFIG = ROOT / "configs" / "cluster.yaml"
PATIENCE = 300.0  # seconds for anything
BLIP = 10.0  # seconds of a cut that is shorter than the deadlines
STEPS = 5  # that a run makes before it is believed to go on

console = Console(width=120)


class Demo:
    def __init__(self, run: Cluster):
        self._run = run
        self._events = Table("event", "what became of it", "seconds", title="three nodes, joined by a bridge")

    def event(self, what: str, outcome: str, over: Callable[[], object]) -> None:
        """Wait until it is over, and tell how long that took."""
        began = time.monotonic()
        eventually(over, PATIENCE, f"{what}: {outcome}")
        seconds = time.monotonic() - began
        console.print(f"{what}: {outcome} after {seconds:.1f} s")
        self._events.add_row(what, outcome, f"{seconds:.1f}")

    def play(self) -> None:
        run = self._run
        nodes = run.network.nodes
        _, second, third = nodes
        self.event("nodes first and second start", "the first step is done", lambda: run.steps() >= 1)
        run.start("third")
        self.event("node third comes late", "its rollout serves", lambda: run.serving() == len(NAMES) - 1)

        lost = len(run.lost())
        run.network.cut(third)
        time.sleep(BLIP)
        run.network.mend(third)
        after = run.steps() + STEPS
        self.event(f"third's link is cut for {BLIP:g} s", f"{STEPS} more steps, nobody lost", lambda: run.steps() >= after)
        assert len(run.lost()) == lost, run.log("coordinator")

        run.network.cut(third)
        self.event("third's link is cut again", "its rollout is given up", lambda: len(run.lost()) > lost)
        alone = run.steps() + STEPS
        self.event("", f"{STEPS} steps without it", lambda: run.steps() >= alone)
        run.network.mend(third)
        self.event("the link is mended", "its rollout serves again", lambda: run.serving() == len(NAMES) - 1)

        lost = len(run.lost())
        second.kill()
        self.event("node second is killed whole", "its rollout is given up", lambda: len(run.lost()) > lost)
        alone = run.steps() + STEPS
        self.event("", f"{STEPS} steps without it", lambda: run.steps() >= alone)
        run.start("second")
        self.event("node second is started again", "its rollout serves", lambda: run.serving() == len(NAMES) - 1)

        run.run.interrupt()
        self.event("Ctrl-C on node first", "saved, and all nodes empty", lambda: not any(node.processes() for node in nodes))

    def show(self) -> None:
        places = Table("node", "address", "processes", title="where they registered")
        for name in NAMES:
            address = self._run.node(name).address
            places.add_row(name, address, ", ".join(one for one, at in self._run.registered() if at == address))
        console.print(places, self._events)


def main() -> None:
    if reason := why_not():
        sys.exit(f"error: {reason}")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/cluster").absolute()
    with cluster(CONFIG, "training.steps=100000", folder=folder, start=2) as run:
        demo = Demo(run)
        try:
            demo.play()
        except AssertionError as error:
            sys.exit(f"error: {error}\n{run.said()}")
        finally:
            demo.show()


if __name__ == "__main__":
    main()
