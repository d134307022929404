"""Whole runs as a user starts them: `sluice` in a process of its own, under a deadline, with a check of what it leaves.

Every process of a run says in its command line where the run lives, so that what belongs to a run can be told by its folder.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests import record

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
POLL = 0.02  # seconds between two looks at something outside that cannot be waited for

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs .venv-vllm: make install-vllm")

LEARNS = 60  # steps of a quickstart in which it learns most of what 200 teach
START = 120.0  # seconds until a run trains
STOP = 60.0  # seconds for an orderly end, on a busy machine
END = 60.0  # seconds until nothing is left of a run that ended


def sluice(
    *arguments: str, timeout: float = START, cwd: Path = ROOT, modules: Path = ROOT, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """One command that is to end by itself. `modules`: a folder whose modules come before all others."""
    command, env = [str(python), "-m", "launcher.cli", *arguments], _environment(modules)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One command in this process, which is sooner done: for what reads files, and for what starts nothing."""
    from launcher import cli  # not at the top: the agents' environment lacks what it imports

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def refused(config: Path | str, folder: Path, *overrides: str, command: str = "train", whole: bool = False) -> str:
    """The one line in which `sluice COMMAND` says what the user has to mend. `whole`: in a process of its own, as it has to be
    where processes run by then, or where the folder is used again, which it locks."""
    run = sluice if whole else here
    ended = run(command, str(config), f"run.dir={folder}", *overrides)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout
    check_gone(folder)
    line = one_line(ended.stderr)
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def shown(run: Path, *options: str) -> list[dict[str, Any]]:
    """What `sluice samples` shows."""
    ended = here("samples", str(run), "--jsonl", *options)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


SOON = Path(__file__).parent / "soon"  # as `modules`: lost processes are started again at once, however many were lost before


def _environment(modules: Path = ROOT) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join((str(modules), str(ROOT)))}


def eventually(check: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `check()`; fails after `seconds`. For what happens in other processes."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL)
    return value


@dataclass
class Live:
    """A `sluice train`, or `eval`, that was started, and where it lives."""

    process: subprocess.Popen[str]
    folder: Path
    console: Path  # what it prints

    @property
    def output(self) -> str:
        return self.console.read_text()

    @property
    def errors(self) -> str:
        return self.console.with_suffix(".err").read_text()

    def wait(self, timeout: float) -> int:
        """Its exit code."""
        return self.process.wait(timeout)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def steps(self) -> int:
        """Steps done so far, by its metrics."""
        path = self.folder / "metrics.jsonl"
        return (
            max((point["step"] for point in points(self.folder) if "actor/grad_norm" in point), default=0)
            if path.exists()
            else 0
        )

    def reaches(self, step: int, timeout: float = START) -> None:
        self.comes(lambda: self.steps() >= step, timeout, f"step {step} in {self.folder}")

    def comes(self, check: Callable[[], Any], timeout: float, what: str) -> None:
        """Waits until `check()` is true, while it runs."""

        def there() -> bool:
            if check():
                return True
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}{self.errors}"
            return False

        eventually(there, timeout, what)

    def says(self, words: str, timeout: float = START) -> None:
        """Waits until it has printed `words`."""
        eventually(lambda: words in self.output, timeout, f"{words!r} on the console of {self.folder}")

    def member(self, name: str, rank: int = 0) -> psutil.Process:
        """The process of this run that was started as `name`, or that rank of it."""
        role, module, found = name.partition("-")[0], "services.coordinator", {}
        for process in belonging(self.folder):
            with suppress(psutil.Error):
                found[process.name() if module not in process.cmdline() else "coordinator"] = process
        return found[f"{role}-{rank}" if rank else name]


def belonging(folder: Path) -> list[psutil.Process]:
    """Every process whose command line names something in the run's folder, and all that descend from one."""
    found: dict[int, psutil.Process] = {}
    for pid in psutil.pids():  # process_iter() gives what it knew under an id that is another's by now
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.pid != os.getpid() and any(str(folder) in word for word in process.cmdline()):
                for one in (process, *process.children(recursive=True)):
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found[one.pid] = one
    return list(found.values())


def shared_files() -> set[str]:
    """And folders, but for those in which simulations live: they may have been started beside the tests."""
    if not SHARED_MEMORY.is_dir():
        return set()
    return {path.name for path in SHARED_MEMORY.iterdir() if not (path.name.startswith("sluice-") and path.is_dir())}


def forgotten(before: set[str]) -> set[str]:
    """Files in shared memory that came since `before` and that no living process has."""
    new = shared_files() - before
    if not new:
        return new
    held = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            held += maps.read_text(errors="replace")
    return {name for name in new & shared_files() if f"{SHARED_MEMORY / name}" not in held}


def table(text: str) -> dict[str, list[str]]:
    """The cells of each process's row in the first table of `sluice status`."""
    first = text[: text.index("└")]
    rows = ([cell.strip() for cell in line.strip("│ \n").split("│")] for line in first.splitlines() if "│" in line)
    return {row[0]: row for row in rows}


def everyone(run: Live) -> list[psutil.Process]:
    """The launcher and all that descend from it, a reward's workers included."""
    launcher = psutil.Process(run.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> None:
    """Waits for it."""

    def running() -> list[psutil.Process]:
        return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    eventually(lambda: not running(), END, "the end of every process")


def listening(processes: list[psutil.Process]) -> set[int]:
    """The ports on which these processes listen."""
    ports = set()
    for process in processes:
        with suppress(psutil.Error):
            ports |= {one.laddr.port for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    return ports


def fill(ballast: Path) -> None:
    """Until there is no room on the file system of this file."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def check_gone(folder: Path, ports: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """No process, port or address of the run is left."""
    eventually(lambda: not belonging(folder), END, f"the end of {[p.cmdline() for p in belonging(folder)]}")
    eventually(lambda: all(map(is_free, ports)), END, f"ports {ports} free again")
    assert not (folder / "coordinator.address").exists()


@contextmanager
def started(
    config: Path,
    *overrides: str,
    folder: Path,
    command: str = "train",
    python: Path | str = sys.executable,
    terminal: int | None = None,
    modules: Path = ROOT,
) -> Iterator[Live]:
    """`sluice COMMAND` in a process group of its own, on the pseudo-terminal `terminal` if there is one, which then has what it
    prints. Leaving the block ends what is left of it, and only that."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    console = folder.with_name(f"{folder.name}.console")
    shared = shared_files()
    record.counts["runs"] += 1
    with console.open("w") as out, console.with_suffix(".err").open("w") as err:
        process = subprocess.Popen(
            [str(python), "-m", "launcher.cli", command, str(config), f"run.dir={folder}", *overrides],
            cwd=ROOT,
            env=_environment(modules),
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=out if terminal is None else terminal,
            stderr=err if terminal is None else terminal,
            text=True,
            start_new_session=True,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY),
        )
    try:
        yield Live(process, folder, console)
    finally:
        leftovers = belonging(folder)
        for one in leftovers:
            with suppress(psutil.Error):
                one.kill()
        if process.poll() is None:
            process.kill()
        process.wait(END)
        psutil.wait_procs(leftovers, END)
    # What other tests' processes have just made is theirs a moment later, or gone.
    eventually(lambda: not forgotten(shared), END, f"that nothing is left in {SHARED_MEMORY}")


def trained(config: Path, *overrides: str, folder: Path, timeout: float) -> Live:
    """A run to its end, which has to be a good one and leave nothing behind."""
    with started(config, *overrides, folder=folder) as run:
        assert run.wait(timeout) == 0, run.output + run.errors
        check_gone(folder)
    return run


# ------------------------------------------------------------------------------------------------ what a run leaves


def points(folder: Path) -> list[dict[str, Any]]:
    """The metrics' lines that are whole."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The points of training steps alone."""
    return [point for point in points(folder) if "actor/grad_norm" in point]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


# ------------------------------------------------------------------------------------------------ configurations

# Nobody waits for its end; its rule takes its time, which leaves the processors to what else goes on.
LONG = ("training.steps=100000", f"rewards.rules=[{{name: '{Path(__file__).with_name('unhurried_rule.py')}:unhurried'}}]")

BASE: dict[str, Any] = {
    "run": {"name": "test"},
    "data": {"handler": "gsm8k", "max_prompt_tokens": 24},
    "sampling": {"group_size": 4, "max_new_tokens": 16},
    "evaluation": {"before": False, "after": False, "problems": 16},
    "rewards": {"rules": [{"name": "gsm8k"}, {"name": "format_answer", "weight": 0.1}]},
    "algorithm": {"kl_coefficient": 0.01},
    "training": {"steps": 4, "groups_per_step": 4, "optimizer": {"learning_rate": 1e-4}},
    "services": {"rollout": {"replicas": 2, "max_num_seqs": 16}},
    "deadlines": {"stop": STOP},
}


def write_config(path: Path, model: Path, **sections: Mapping[str, Any]) -> Path:
    """A small run on the model folder's data; `sections` are merged into the base."""
    made = {
        "model": {"path": str(model / "model")},
        "data": {"train": str(model / "train.jsonl"), "eval": str(model / "eval.jsonl")},
    }
    path.write_text(yaml.safe_dump(_merged(_merged(BASE, made), sections)))
    return path


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merged(out[key], value) if isinstance(value, Mapping) and isinstance(out.get(key), Mapping) else value
    return out


def one_line(text: str) -> str:
    """The only line of `text`, which is no traceback."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]
