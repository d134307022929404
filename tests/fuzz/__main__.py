"""Read many broken files: `python -m tests.fuzz NAME ... [--minutes 10 | --examples 60]`.

Each input is a good file, or one of the corpus, with some changes. It must end with a result or with an error of ours of one
line, within `TIME` and `MEMORY`; nothing is to be run, unpickled or sent, and no file is to be changed but in the input's own
folder. What breaks is shrunk, written to tests/fuzz/corpus/NAME, and ends the search with status 1. `--examples` are the same
each time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies

from runtime.errors import SluiceError
from tests.fuzz.targets import TARGETS, Target, assert_line

CORPUS = Path(__file__).with_name("corpus")
TIME = 10.0  # s of one input
MEMORY = 1 << 30  # bytes beside what the process has when it begins
RUNS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "pickle.find_class",
)
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
)


class Watch:
    """What the process does while `folder` is set. It stays in force, as Python's audit hooks do."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        changed = str(args[0]) if writes or event in CHANGES else ""
        if event in RUNS or (changed and not changed.startswith(str(self.folder)) and not changed.isdigit()):
            self.seen.append(f"{event} {args}")


class TooSlow(Exception):
    """An input took longer than `TIME`."""


def _too_slow(*_: Any) -> None:
    raise TooSlow


def read(target: Target, data: bytes, folder: Path, watch: Watch) -> None:
    """One input. Raises what breaks the rules."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    watch.seen.clear()
    watch.folder = folder
    signal.setitimer(signal.ITIMER_REAL, TIME)
    try:
        target.read(data, folder)
    except SluiceError as error:
        assert_line(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.folder = None
    assert not watch.seen, watch.seen


NUMBER = strategies.integers(0, 1 << 16)
CHANGE = strategies.tuples(strategies.sampled_from(["flip", "cut", "twice", "word", "join"]), NUMBER, NUMBER, NUMBER)


def changed(inputs: list[bytes], words: tuple[bytes, ...], first: int, changes: list[tuple[str, int, int, int]]) -> bytes:
    """The input `first`, changed."""
    data = bytearray(inputs[first % len(inputs)])
    for kind, at, length, choice in changes:
        start = at % (len(data) + 1)
        stop = start + 1 + length % 24
        if kind == "flip" and start < len(data):
            data[start] = choice & 255
        elif kind == "cut":
            del data[start : stop if choice % 8 else None]
        elif kind == "twice":
            data[start:start] = data[start:stop] * (1 + choice % 3)
        elif kind == "word":
            data[start : stop if choice % 2 else start] = words[length % len(words)]
        elif kind == "join":
            other = inputs[choice % len(inputs)]
            data[start:] = other[length % (len(other) + 1) :]
    return bytes(data)


class Search:
    """Inputs of one target."""

    def __init__(self, name: str, folder: Path, watch: Watch):
        self.name, self.watch, self.tried = name, watch, 0
        self.target, self.folder = TARGETS[name], folder / "input"
        self.kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
        self.folder.mkdir(parents=True)
        self.inputs = [*self.target.seeds(self.folder), *self.kept]
        self.broken = b""

    def examples(self, count: int, seed: int | None) -> None:
        """The corpus, as it is, then `count` changed inputs; those of `seed`, or the same each time. Raises what breaks."""
        for data in self.inputs:
            self._one(data)

        @hypothesis.settings(
            max_examples=count, derandomize=seed is None, deadline=None, database=None,
            suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
        )  # fmt: skip
        @hypothesis.given(strategies.integers(0, 1 << 10), strategies.lists(CHANGE, max_size=12))
        def search(first: int, changes: list[tuple[str, int, int, int]]) -> None:
            self._one(changed(self.inputs, self.target.words, first, changes))

        (search if seed is None else hypothesis.seed(seed)(search))()

    def _one(self, data: bytes) -> None:
        self.tried += 1
        try:
            read(self.target, data, self.folder, self.watch)
        except BaseException:
            self.broken = data  # the last one is the smallest
            raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(TARGETS), metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--examples", type=int, default=60)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_slow)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        searches = [Search(name, Path(folder) / name, watch) for name in options.names]
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        return max([_search(search, options) for search in searches])


def _search(search: Search, options: argparse.Namespace) -> int:
    ends, seed = time.monotonic() + 60 * options.minutes, time.time_ns() if options.minutes else None
    try:
        search.examples(options.examples if seed is None else 1000, seed)
        while time.monotonic() < ends:
            seed = time.time_ns()
            search.examples(1000, seed)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        kept = CORPUS / search.name / hashlib.sha256(search.broken).hexdigest()[:12]
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(search.broken)
        print(f"{search.name}: input {search.tried} breaks it: {kept}")
        return 1
    print(f"{search.name}: {search.tried:,} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
