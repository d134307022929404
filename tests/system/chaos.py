"""A campaign of faults against one run over three nodes, each in a network namespace; takes root:
`python -m tests.system.chaos --faults 100 --seed 1`.

::

    draw a fault by seed → let it happen → [undo it] → wait for two more steps → the next …  Ctrl-C, and a look at what is left

Prints a table of fault × outcome × seconds until the run had made a step that began afterwards, and ends with 1 where the run
ended, stood still, lost a group, repeated or lost a step without going back to a checkpoint, or left something behind.
`--ranks 4` spreads the trainer's ranks over the nodes, and any of them is killed or stopped; `--kinds` takes a part of the
faults, such as `rank`. `--save FILE` keeps what was measured, and `--table FILE …` prints
what several campaigns measured as one table.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.system.cluster import NAMES, Cluster, cluster
from tests.system.conftest import make_tiny
from tests.system.little_memory import little_memory
from tests.system.namespaces import why_not
from tests.system.runs import LONG, SOON, eventually, fill, forgotten, points, shared_files, write_config

Measured = dict[str, list[tuple[float, bool, float]]]
"""Three numbers of each fault, by kind: seconds until the run went on, whether it went back to a checkpoint, and seconds to the
next step, which may have begun before the fault."""

# A loss that is PPO's; once a file is there, the trainer's next bucket changes behind its checksum's back.
LOSS = """
from pathlib import Path
from sluice import policy_loss

@policy_loss("flips", zero_without_advantage=True)
def flips(inputs, options):
    from runtime.algorithms.losses import ppo
    from runtime.weights.sender import SendBuffers
    if not hasattr(SendBuffers, "whole"):
        SendBuffers.whole = SendBuffers._require_same
        SendBuffers._require_same = require_same
    return ppo(inputs, options)

def require_same(self, index, digest, name):
    self.whole(index, digest, name)
    asked = Path(__file__).with_name("flip")
    if asked.exists():
        asked.unlink()
        self.buffers[[number for number, _ in self.own].index(index)][0] ^= 1
"""
GROUPS = 4
SILENCE = 4.0
STUCK = 240.0  # seconds without a step after which the run counts as hung
RESTARTS = 1_000_000  # with `SOON`: no death has anything to do with the one before
SETTINGS = {
    "cluster": {"nodes": [{"name": name} for name in NAMES]},
    "training": {"groups_per_step": GROUPS},
    "checkpoint": {"every": 5},
    "deadlines": {"keepalive": SILENCE, "start": 180.0},
    "weight_sync": {"transfer_timeout": 20.0, "commit_timeout": 20.0, "join_timeout": 20.0},
    "services": {
        role: {"placement": places, "restarts": RESTARTS}
        for role, places in {
            "trainer": ["first"],
            "reference": ["first", "second"],
            "reward": ["first", "third"],
            "rollout": ["second", "third"],
        }.items()
    },
}
SETTINGS["services"]["coordinator"] = {"restarts": RESTARTS}  # type: ignore[index]
for role in ("reference", "reward", "rollout"):
    SETTINGS["services"][role]["replicas"] = 2  # type: ignore[index]

PROCESSES = ("coordinator", "trainer-0", "reference-0", "reference-1", "reward-0", "reward-1", "rollout-0", "rollout-1")
AWAY = NAMES[1:]  # nodes that may be lost
# Of tc: netem, which could delay and reorder, is not in every kernel.
LINKS = {
    "slow link": "tbf rate 500kbit burst 8kb latency 400ms",
    "lossy link": "tbf rate 2mbit burst 3kb latency 5ms",  # what comes faster is dropped
}


class Campaign:
    """The faults, one after the other, and what was `measured`."""

    def __init__(
        self, run: Cluster, disk: Path, little: Path | None, chance: random.Random, ranks: int = 1, kinds: Sequence[str] = ("",)
    ):
        """`disk`: the file system of the run's folder. `little`: takes processes that are to be out of memory. `ranks`: of the
        trainer. `kinds`: beginnings of the names of faults."""
        self.run, self.chance, self._disk, self._little, self._ranks = run, chance, disk, little, ranks
        self.measured: Measured = defaultdict(list)
        self._kinds: dict[str, Callable[[], None]] = {
            "kill": lambda: self._signal(signal.SIGKILL),
            "stop": lambda: self._signal(signal.SIGSTOP),
            "rank killed": lambda: self._strike(signal.SIGKILL, 1),
            "rank stopped": lambda: self._strike(signal.SIGSTOP, 1),
            "ranks killed": lambda: self._strike(signal.SIGKILL, chance.randint(1, ranks)),
            "kill of two at once": lambda: self._signal(signal.SIGKILL, count=2),
            "kill in a recovery": self._twice,
            "coordinator killed": lambda: self._signal(signal.SIGKILL, ("coordinator",)),
            "coordinator stopped": lambda: self._signal(signal.SIGSTOP, ("coordinator",)),
            "link cut for less than silence": lambda: self._cut(chance.uniform(0.5, 0.7 * SILENCE)),
            "link cut for longer": lambda: self._cut(chance.uniform(2, 4) * SILENCE),
            **{kind: lambda how=how: self._disturb(how) for kind, how in LINKS.items()},  # type: ignore[misc]
            "node killed": self._kill_node,
            "full disk": self._fill,
            "changed bucket": (disk.parent / "flip").touch,
            **({"out of memory": self._starve} if little is not None else {}),
        }
        self._kinds = {name: happen for name, happen in self._kinds.items() if name.startswith(tuple(kinds))}

    def play(self, faults: int) -> None:
        for number in range(faults):
            kind = self.chance.choice(list(self._kinds))
            self._wait(self.chance.uniform(0.0, 0.5))
            self.what = kind
            self._kinds[kind]()
            began, at, before = time.monotonic(), self._steps(), self._incarnation()
            eventually(lambda at=at: self._steps() > at, STUCK, "a step")
            following = time.monotonic() - began
            eventually(lambda at=at: self._steps() > at + 1, STUCK, "a step")  # the first may be older
            seconds, back = time.monotonic() - began, self._incarnation() > before
            self.measured[kind].append((seconds, back, following))
            told = ", from a checkpoint" if back else ""
            line = f"{number + 1}. {self.what}: the next step after {following:.1f} s, one begun since after {seconds:.1f} s"
            print(f"{line}{told}, step {self._steps()}", flush=True)

    def check_steps(self) -> None:
        """Each step is recorded once, in order, unless the run went back to a checkpoint."""
        made = [int(point["step"]) for point in points(self._disk / "run") if "timing/all" in point]
        repeated = sum(step <= max(made[:at], default=0) for at, step in enumerate(made))
        lost = max(made) - len(set(made))
        print(f"{len(made)} steps recorded: {repeated} repeated, {lost} lost", flush=True)
        back = any(back for measured in self.measured.values() for _, back, _ in measured)
        assert not lost, f"{lost} steps are lost"
        assert back or not repeated, f"{repeated} steps are repeated"

    def _signal(self, number: signal.Signals, among: Sequence[str] = PROCESSES[1:], count: int = 1) -> None:
        for name in self.chance.sample(list(among), count):
            with suppress(psutil.NoSuchProcess, KeyError):  # it is away already
                self.run.run.member(name).send_signal(number)
                self.what += f" {name}"

    def _strike(self, number: signal.Signals, count: int) -> None:
        """Send a signal to some of the trainer's ranks."""
        for rank in self.chance.sample(range(self._ranks), count):
            with suppress(psutil.NoSuchProcess, KeyError):
                self.run.run.member("trainer-0", rank).send_signal(number)
                self.what += f" {rank}"

    def _twice(self) -> None:
        self._signal(signal.SIGKILL, PROCESSES)
        self._wait(self.chance.uniform(0.0, 3.0))
        self._signal(signal.SIGKILL, PROCESSES)

    def _cut(self, seconds: float) -> None:
        node = self._node()
        self.run.network.cut(node)
        self._wait(seconds)
        self.run.network.mend(node)

    def _disturb(self, how: str) -> None:
        node = self._node()
        with self.run.network.disturbed(node, how):
            self._wait(self.chance.uniform(1.0, 10.0))

    def _kill_node(self) -> None:
        node = self._node()
        node.kill()
        self._wait(self.chance.uniform(0.0, 8.0))
        self.run.start(NAMES[self.run.network.nodes.index(node)])

    def _fill(self) -> None:
        """For some seconds there is no room for anything of the run."""
        ballast = self._disk / "ballast"
        fill(ballast)
        self._wait(self.chance.uniform(1.0, 6.0))
        ballast.unlink()

    def _starve(self) -> None:
        assert self._little is not None
        name = self.chance.choice(PROCESSES)
        with suppress(psutil.NoSuchProcess, KeyError, OSError):
            self._little.write_text(str(self.run.run.member(name).pid))
            self.what += f" {name}"

    def _incarnation(self) -> int:
        """Of the newest version: one more with each time that the run has gone back to a checkpoint."""
        return int(next((point["incarnation"] for point in reversed(points(self._disk / "run")) if "incarnation" in point), 0))

    def _node(self):  # type: ignore[no-untyped-def]
        name = self.chance.choice(AWAY)
        self.what += f" {name}"
        return self.run.node(name)

    def _steps(self) -> int:
        self._wait(0.0)
        return self.run.run.steps()

    def _wait(self, seconds: float) -> None:
        """While a fault lasts the run may not end either."""
        with suppress(subprocess.TimeoutExpired):
            code = self.run.run.process.wait(seconds)
            raise AssertionError(f"the run ended with {code}")

    what = "the start"


def check_ledger(folder: Path, size: int = GROUPS) -> None:
    """Each group has one final state, each step its batch of `size`, and no group two."""
    with LedgerReader(folder) as ledger:
        ledger.check_final(size)
        rows = list(ledger.groups())
    assert [row.group_id for row in rows] == list(range(len(rows))), "a prompt was skipped or repeated"
    assert {row.why for row in rows if row.phase == Phase.DROPPED} <= {"run ended"}
    places = sorted((row.step, row.place) for row in rows if row.phase == Phase.RETIRED)
    assert places == [(step, place) for step in range(len(places) // size) for place in range(size)]


def play(faults: int, seed: int, folder: Path, ranks: int = 1, kinds: Sequence[str] = ("",)) -> Measured:
    """A campaign, from the start of the run to its end. Raises AssertionError for whatever does not hold."""
    shared, disk = shared_files(), folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], check=True, timeout=10)
    (disk / "run").mkdir()
    (folder / "run").symlink_to(disk / "run")  # what the agents print is beside it, on another file system
    try:
        (folder / "loss.py").write_text(LOSS)
        config = write_config(folder / "config.yaml", make_tiny(folder / "tiny"), **SETTINGS)
        own = [f"algorithm.loss={folder / 'loss.py'}:flips"]
        if ranks > 1:  # over as many nodes as they can be spread over evenly
            nodes = NAMES[: next(count for count in (3, 2, 1) if ranks % count == 0)]
            own += [f"services.trainer.processes={ranks}", f"services.trainer.placement=[{', '.join(nodes)}]"]
        with little_memory() as little, cluster(config, *LONG, *own, folder=folder / "run", modules=SOON) as run:
            run.run.reaches(2, STUCK)
            campaign = Campaign(run, disk, little, random.Random(seed), ranks, kinds)
            try:
                campaign.play(faults)
                run.run.interrupt()
                eventually(
                    (disk / "run" / "summary.json").exists, STUCK, "its end"
                )  # torchrun's code tells of the signal alone
                eventually(lambda: not any(node.processes() for node in run.network.nodes), STUCK, "the end of all processes")
            except AssertionError as error:
                newest = max((disk / "run" / "logs").glob("coordinator*.log"), key=lambda path: path.stat().st_mtime)
                raise AssertionError(
                    f"{campaign.what}: {error}\n{run.run.output[-2000:]}\n{newest.read_text()[-4000:]}"
                ) from error
        check_ledger(disk / "run" / "ledger")
        campaign.check_steps()
        eventually(lambda: not forgotten(shared), STUCK, "that nothing is left in shared memory")
        return campaign.measured
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


def table(campaigns: Iterable[Measured]) -> str:
    """Markdown: a row for each kind of fault, over all campaigns."""
    together: Measured = defaultdict(list)
    for one in campaigns:
        for kind, measured in one.items():
            together[kind] += measured
            together["all"] += measured
    lines = ["| fault | times | went on | of them from a checkpoint | p50 | p99 | worst | next step p50 | worst |"]
    lines.append("| --- |" + " --- |" * 8)
    for kind, measured in sorted(together.items(), key=lambda item: (item[0] == "all", item[0])):
        ordered, back = sorted(seconds for seconds, *_ in measured), sum(back for _, back, *_ in measured)
        following = sorted(seconds for _, _, seconds in measured)
        further = f"{following[len(following) // 2]:.1f} | {following[-1]:.1f}"
        p50, p99 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        count = len(ordered)
        lines.append(f"| {kind} | {count} | {count} | {back} | {p50:.1f} | {p99:.1f} | {ordered[-1]:.1f} | {further} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    parser.add_argument("--kinds", nargs="+", default=[""], help="only faults whose names begin so")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(path.read_text()) for path in arguments.table))
        return
    if reason := why_not():
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
        try:
            measured = play(arguments.faults, arguments.seed, Path(folder), arguments.ranks, arguments.kinds)
        except AssertionError as error:
            sys.exit(f"seed {arguments.seed}: {error}")
    if arguments.save:
        arguments.save.write_text(json.dumps(measured))
    print(table([measured]))


if __name__ == "__main__":
    main()
