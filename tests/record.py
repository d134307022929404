"""A record of what each test costs: JSON lines in the file that SLUICE_TEST_RECORD names. `tests/ci.py` reads the file.

One line per test: its id, its outcome, seconds of set-up, call and teardown, seconds of each fixture, the whole runs that it
started and the processes that it started itself. With xdist a worker counts, and the main process writes.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import monotonic  # tests replace time.monotonic
from typing import Any

import pytest

FILE = "SLUICE_TEST_RECORD"
ONLY = "SLUICE_TEST_ONLY"
"""Names a file of node ids, one a line: the only tests to run."""
SHORT = 0.005  # seconds: a fixture below is not recorded
_STARTED = ("subprocess.Popen", "os.fork", "os.posix_spawn")  # audit events of one new process each

SHARES = 7

counts: Counter[str] = Counter()
"""What this process has started since it began: `runs` (tests/system/runs.py counts them) and `processes`."""


def start_counting() -> None:
    """Count each process that this process starts."""
    sys.addaudithook(lambda event, _: counts.update(processes=1) if event in _STARTED else None)
    start = multiprocessing.process.BaseProcess.start

    def counted(self: Any) -> None:  # multiprocessing raises no audit event
        counts["processes"] += 1
        start(self)

    multiprocessing.process.BaseProcess.start = counted  # type: ignore[method-assign]


def is_in_share(name: str, word: str) -> bool:
    """Tell whether `word`, such as a date, chooses this name: one of SHARES does; `all` chooses each, and "" none."""
    return word == "all" or (bool(word) and zlib.crc32(f"{word} {name}".encode()) % SHARES == 0)


class Recorder:
    """The hooks of pytest that measure in the process which runs tests, and write in the one which reports."""

    def __init__(self, path: Path, writes: bool):
        self._path, self._writes = path, writes
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by node id, of the phases that have ended
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        for name in (FILE, ONLY):
            os.environ.pop(name, None)  # a test that runs pytest has no part in this record
        item.user_properties.append(("before", dict(counts)))
        if item.get_closest_marker("long") is not None:
            item.user_properties.append(("long", True))
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
        began = monotonic()
        result = yield
        if (seconds := monotonic() - began) > SHORT:
            found = [f"{fixturedef.argname} ({fixturedef.scope})", round(seconds, 4)]
            request._pyfuncitem.user_properties.append(("fixture", found))
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        before: Any = dict(item.user_properties)["before"]
        item.user_properties.append(("started", {name: counts[name] - before.get(name, 0) for name in counts}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes:
            return
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when in ("setup", "call"):
            return  # a worker that crashed reports another phase, and no teardown
        fixtures = [value for name, value in report.user_properties if name == "fixture"]
        known: dict[str, Any] = dict(report.user_properties)
        self._write(
            id=report.nodeid,
            outcome="failed" if report.nodeid in self._failed else "passed",
            seconds=round(self._seconds.pop(report.nodeid), 4),
            fixtures=fixtures,
            long=known.get("long", False),
            **known.get("started", {}),
        )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._writes:
            self._write(exit=int(exitstatus))

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
