"""Run the steps of continuous integration, and say what each cost: `python -m tests.ci [STEP …]`, which `.ci/run` calls.

::

    check ┐          ranks ┐                               vllm   ┐
          ├─► test ─►        ├─► system ─► system-vllm ─►         ├─► failed tests once more, alone ─► costs
    envs  ┘          share   ┘                             agents ┘

Each step is a target of the Makefile. Steps of one group run beside each other. A test that fails and then passes alone is
printed as `flaky: NAME` and does not fail the command; a test that fails twice does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests import record

ROOT = Path(__file__).parents[1]
LIMITS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("limits.yaml").read_text())
FOLDER = ROOT / ".ci-costs"
"""A record of each step of the last time, for `make costs`."""
GROUPS = (("check", "environments"), ("test",), ("ranks", "share"), ("system",), ("system-vllm",), ("vllm", "agents"))
TARGETS = {"check": "lint docs", "test": "test", "environments": "environments"} | {
    name: f"test-{name}" for name in ("ranks", "share", "system", "system-vllm", "vllm", "agents")
}
KILLED = 5.0  # seconds until killed processes are gone
GIVE_UP = 4.0  # times its limit: a step that takes longer hangs, and is ended
AGAIN = 10  # failed tests at most are run again: more are no accident
SLOWEST = 10
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- costs: `make costs` writes this -->\n", "<!-- costs: end -->\n"
FILES, FIXTURES = 20, 10  # rows of the tables in PAGE
COUNTED = ("tests", "runs", "processes")
_running: set[subprocess.Popen[str]] = set()


@dataclass
class Step:
    """One target of the Makefile: how it ended, and what its tests cost."""

    name: str
    status: int = 0
    seconds: float = 0.0
    output: str = ""
    tests: list[dict[str, Any]] = field(default_factory=list)  # lines of tests/record.py
    exit: int = 0  # pytest's own status: make says 2 for each failure

    @property
    def failed(self) -> list[str]:
        """Node ids of the tests that failed."""
        return [test["id"] for test in self.tests if test["outcome"] == "failed"]

    @property
    def may_repeat(self) -> bool:
        """Tell whether tests failed, and nothing else: pytest has the status 1 then."""
        return self.exit == 1 and 0 < len(self.failed) <= AGAIN

    def count(self) -> dict[str, int]:
        """Count tests, whole runs and processes, without the long tests: their share changes by date."""
        counted = [test for test in self.tests if not test["long"]]
        return {"tests": len(counted)} | {name: sum(test.get(name, 0) for test in counted) for name in COUNTED[1:]}


def run_step(name: str, record_path: Path, stream: bool, arguments: Sequence[str] = (), only: Path | None = None) -> Step:
    """Run one target of the Makefile. With `stream` its output goes to the console as it comes; otherwise it is kept."""
    record_path.unlink(missing_ok=True)
    environment = os.environ | {record.FILE: str(record_path)} | ({record.ONLY: str(only)} if only else {})
    limit = GIVE_UP * LIMITS["seconds"][name]
    output = None if stream else subprocess.PIPE
    began = time.monotonic()
    process = subprocess.Popen(
        ["make", "--no-print-directory", *TARGETS[name].split(), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=None if stream else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _running.add(process)
    try:
        printed = process.communicate(timeout=limit)[0] or ""
    except subprocess.TimeoutExpired:
        printed = f"error: {name} did not end within {limit:.0f} s\n"
    finally:
        kill(process)
        process.wait()
        _running.discard(process)
    lines = read_lines(record_path)
    return Step(
        name,
        status=process.returncode,
        seconds=time.monotonic() - began,
        output=printed,
        tests=[line for line in lines if "id" in line],
        exit=max((line["exit"] for line in lines if "exit" in line), default=0),
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a step that hangs or that was interrupted, with the whole runs that its tests have started."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)  # a whole run is no member of the step's group
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=KILLED)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record; none where the step runs no tests."""
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def run_steps(names: Sequence[str]) -> list[Step]:
    """Run the steps of these names, group by group; a step that fails does not keep the others from running."""
    steps: list[Step] = []
    for group in GROUPS:
        chosen = [name for name in group if name in names]
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(run_step, name, FOLDER / f"{name}.jsonl", len(chosen) == 1) for name in chosen]
            try:
                for future in as_completed(running):
                    step = future.result()
                    ended = "passed" if step.status == 0 else "FAILED"
                    say(f"{step.output}==== {step.name}: {ended} after {step.seconds:.0f} s")
                    steps.append(step)
            except KeyboardInterrupt:
                for process in tuple(_running):
                    kill(process)
                raise
    return steps


def run_again(step: Step) -> list[str]:
    """Run the failed tests of `step` once more, each alone. Returns what fails the command."""
    if step.status == 0:
        return []
    if not step.may_repeat:
        return [f"{step.name}: failed", *(f"{step.name}: failed: {node}" for node in step.failed)]
    twice = []
    with tempfile.TemporaryDirectory() as folder:
        only = Path(folder) / "only"
        for node in step.failed:
            only.write_text(node)
            arguments = ["WORKERS=", f"TESTS={node.partition('::')[0]}"]
            again = run_step(step.name, Path(folder) / "record", True, arguments, only)
            if again.status == 0 and [test["id"] for test in again.tests] == [node]:
                say(f"flaky: {node}")
            else:
                twice.append(f"{step.name}: failed twice: {node}")
    return twice


def check_costs(steps: Sequence[Step]) -> list[str]:
    """Print what each step cost and the slowest tests; return the limits that are exceeded."""
    exceeded = []
    say("\nstep          seconds   limit   tests    runs  processes")
    for step in steps:
        limit, counts = LIMITS["seconds"][step.name], step.count() if step.tests else {}
        cells = " ".join(f"{counts.get(name, ''):>7}" for name in COUNTED)
        say(f"{step.name:<12} {step.seconds:8.0f} {limit:7} {cells}")
        if step.seconds > 2 * limit:
            exceeded.append(f"{step.name}: {step.seconds:.0f} s, more than twice its limit of {limit} s (tests/limits.yaml)")
        elif step.seconds > limit:
            say(f"warning: {step.name}: {step.seconds:.0f} s, its limit is {limit} s (tests/limits.yaml)")
        for name, allowed in LIMITS["counts"].get(step.name, {}).items() if counts else ():
            if counts[name] > allowed:
                exceeded.append(f"{step.name}: {counts[name]} {name}, tests/limits.yaml allows {allowed}")
            elif counts[name] < allowed:
                say(f"note: {step.name}: {counts[name]} {name}; lower {allowed} in tests/limits.yaml")
    slowest = sorted(((test["seconds"], test["id"]) for step in steps for test in step.tests), reverse=True)
    say("\nslowest tests\n" + "\n".join(f"{seconds:8.1f} s  {node}" for seconds, node in slowest[:SLOWEST]))
    return exceeded


def tables() -> str:
    """Return the tables of the last time: seconds by step, by file of tests and by fixture."""
    seconds: defaultdict[str, float] = defaultdict(float)
    fixtures: defaultdict[str, float] = defaultdict(float)
    numbers = Counter[str]()
    for path in sorted(FOLDER.glob("*.jsonl")):
        for test in read_lines(path):
            if "id" in test:
                file = test["id"].partition("::")[0]
                seconds[file] += test["seconds"]
                numbers[file] += 1
                for name, spent in test["fixtures"]:
                    fixtures[name] += spent
    steps = json.loads((FOLDER / "steps.json").read_text())
    lines = ["| step of `.ci/run` | seconds | limit |", "| --- | --- | --- |"]
    lines += [f"| {name} | {spent:.0f} | {LIMITS['seconds'][name]} |" for name, spent in steps.items()]
    lines += ["", "| file | seconds | tests |", "| --- | --- | --- |"]
    lines += [f"| `{file}` | {spent:.1f} | {numbers[file]} |" for file, spent in most(seconds, FILES)]
    lines += ["", "| fixture (scope) | seconds |", "| --- | --- |"]
    lines += [f"| `{name}` | {spent:.1f} |" for name, spent in most(fixtures, FIXTURES)]
    return "\n".join(lines) + "\n"


def most(seconds: dict[str, float], count: int) -> list[tuple[str, float]]:
    """Return the `count` entries with the most seconds."""
    return sorted(seconds.items(), key=lambda pair: -pair[1])[:count]


def write_tables() -> None:
    """Replace the tables in CONTRIBUTING.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.partition(END)[2])


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    names = [name for group in GROUPS for name in group]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=names, metavar="STEP", help=f"the steps to run, of {', '.join(names)}")
    parser.add_argument("--installed", type=float, default=0.0, help="seconds that the installation before this command took")
    parser.add_argument(
        "--table", action="store_true", help="write the costs of the last time into CONTRIBUTING.md; run nothing"
    )
    options = parser.parse_args()
    if unknown := set(options.steps) - set(names):
        parser.error(f"STEP: {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    if options.table:
        return write_tables()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever ends this command, it ends its steps
    FOLDER.mkdir(exist_ok=True)
    steps = [Step("install", seconds=options.installed), *run_steps(options.steps)]
    (FOLDER / "steps.json").write_text(json.dumps({step.name: round(step.seconds, 1) for step in steps}))
    errors = [line for step in steps for line in run_again(step)] + check_costs(steps)
    say("".join(f"\nerror: {line}" for line in errors) or "\nall steps passed")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
