"""The logs of real processes: nothing is lost, whoever writes it and however busy the launcher is, and files stay small."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from launcher.node.logs import Log
from launcher.node.supervisor import Supervisor
from launcher.node.topology import ProcessSpec
from launcher.view import View
from runtime.config import Logs
from tests.loopback.line_views import Lines

DEADLINE = 60.0
NUMBERED = """
import ctypes, sys
libc = ctypes.CDLL(None)
for number in range(int(sys.argv[1])):
    line = b"line %d\\n" % number
    if number % 2:
        libc.write(2, line, len(line))
    else:
        print(line.decode(), end="", flush=True)
"""
MUCH_THEN_MARK = """
import os, pathlib, sys
for _ in range(128):
    os.write(1, b"x" * 65535 + b"\\n")
pathlib.Path(sys.argv[1]).touch()
"""


def spec(code: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(name="role-0", role="role", command=(sys.executable, "-c", code, *arguments), env={})


def supervised(
    logs: Path,
    test: Callable[[Supervisor], Awaitable[None]],
    settings: Logs = Logs(),  # noqa: B008
    show: Callable[[str, str], None] | None = None,
    said: list[str] | None = None,
) -> list[str]:
    """What the supervisor said, in `said` as it does; every process is gone."""
    said = [] if said is None else said

    async def within() -> None:
        supervisor = Supervisor(logs, Lines(said, show), settings)
        try:
            await asyncio.wait_for(test(supervisor), DEADLINE)
        finally:
            await supervisor.end_all(0.0)

    asyncio.run(within())
    return said


def one(started: ProcessSpec) -> Callable[[Supervisor], Awaitable[None]]:
    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(started)
        assert await child.process.wait() == 0

    return test


def files(logs: Path) -> list[Path]:
    """From the oldest to the newest."""
    older = sorted(logs.glob("role-0.log.*"), key=lambda path: -int(path.suffix[1:]))
    return [*older, logs / "role-0.log"]


def test_what_python_and_c_write_is_in_order_over_files_of_whole_lines(tmp_path: Path) -> None:
    supervised(tmp_path, one(spec(NUMBERED, "3000")), Logs(max_bytes=4096, keep=100))
    found = files(tmp_path)
    assert len(found) > 5
    texts = [path.read_text() for path in found]
    assert all(len(text) <= 4096 and (not text or text.endswith("\n")) for text in texts)
    assert "".join(texts).splitlines() == [f"line {number}" for number in range(3000)]


def test_only_so_many_older_files_are_kept_and_none_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "role-0.log.7").write_text("of a run before\n")
    supervised(tmp_path, one(spec(NUMBERED, "3000")), Logs(max_bytes=4096, keep=2))
    found = files(tmp_path)
    assert [path.name for path in found] == ["role-0.log.2", "role-0.log.1", "role-0.log"]
    lines = "".join(path.read_text() for path in found).splitlines()
    assert lines == [f"line {number}" for number in range(3000 - len(lines), 3000)]


def test_with_none_kept_the_one_file_starts_anew(tmp_path: Path) -> None:
    supervised(tmp_path, one(spec(NUMBERED, "3000")), Logs(max_bytes=4096, keep=0))
    assert [path.name for path in tmp_path.iterdir()] == ["role-0.log"]
    assert (tmp_path / "role-0.log").read_text().endswith("line 2999\n")


def test_a_line_longer_than_a_file_is_cut(tmp_path: Path) -> None:
    supervised(tmp_path, one(spec("print('x' * 10000)")), Logs(max_bytes=4096, keep=9))
    assert [path.stat().st_size for path in files(tmp_path)] == [4096, 4096, 10001 - 2 * 4096]


def test_a_process_that_writes_much_does_not_wait_for_a_busy_launcher(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(spec(MUCH_THEN_MARK, str(mark)))
        until = time.monotonic() + DEADLINE / 2
        while not mark.exists():  # the event loop stands still meanwhile
            assert time.monotonic() < until
            time.sleep(0.01)  # noqa: ASYNC251
        await child.process.wait()

    logs = tmp_path / "logs"
    logs.mkdir()
    supervised(logs, test)
    assert (logs / "role-0.log").stat().st_size == 128 << 16


def test_the_reason_of_an_end_is_the_last_that_was_written(tmp_path: Path) -> None:
    code = "import os; os.write(2, b'noise\\n' * 400000); os.write(2, b'error: it cannot be\\n'); os._exit(1)"

    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(spec(code))
        assert await supervisor.first_failure() is child
        assert str(child.fault()) == f"it cannot be (log: {child.log})"

    supervised(tmp_path, test)


def test_what_a_dead_process_started_goes_on_writing_there(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork():\n os._exit(0)\ntime.sleep(0.2)\nos.write(1, b'of the child\\n')\ntime.sleep(600)"

    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(spec(code))
        assert await child.process.wait() == 0
        while child.output.tail() != "of the child\n":  # noqa: ASYNC110 - the test's own deadline ends it
            await asyncio.sleep(0.01)

    supervised(tmp_path, test)


def test_a_process_outlives_a_disk_that_is_full_and_its_user_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "role-0.log").symlink_to("/dev/full")
    (line,) = supervised(tmp_path, one(spec(NUMBERED, "3000")))
    assert line == f"{tmp_path}/role-0.log: no space left on device: output of this process is being lost"


def test_how_much_was_lost_stands_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Log._write

    def full_at_first(log: Log, data: bytes) -> None:
        if data == b"lost\n":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(log, data)

    monkeypatch.setattr(Log, "_write", full_at_first)
    mark = tmp_path / "mark"
    code = f"import os, time\nos.write(1, b'lost\\n')\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.01)\nprint('kept')"

    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(spec(code))
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        mark.touch()
        assert await child.process.wait() == 0
        assert child.output.tail() == "[5 bytes were lost here]\nkept\n"

    said: list[str] = []
    supervised(tmp_path, test, said=said)


def test_every_line_is_shown_with_the_name_of_its_process(tmp_path: Path) -> None:
    console, lines = Console(width=60), list[tuple[str, str]]()
    view = View(console, verbose=True)
    code = "import os; os.write(1, b'half of '); os.write(2, b'a line\\n'); os.write(1, 'é'.encode() + b' \\xff\\nno end')"
    with console.capture() as capture:
        view.output("coordinator", "a longer name")
        supervised(tmp_path, one(spec(code)), show=lambda name, line: lines.append((name, line)))
        for shown in lines:
            view.output(*shown)
    assert capture.get().splitlines() == [
        "coordinator | a longer name",
        "role-0      | half of a line",
        "role-0      | é \ufffd",
        "role-0      | no end",
    ]


@pytest.mark.parametrize("gone", [BrokenPipeError(), SystemExit(1)])
def test_a_reader_who_has_gone_stops_no_log(tmp_path: Path, gone: BaseException) -> None:
    def show(name: str, line: str) -> None:
        raise gone

    supervised(tmp_path, one(spec(NUMBERED, "100")), show=show)
    assert (tmp_path / "role-0.log").read_text().endswith("line 99\n")


def test_what_is_added_does_not_tear_a_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "role-0.log", Logs(), "role-0")
    with log.writer() as out:
        writer = os.dup(out)
    os.write(writer, b"first\nsec")
    log.add(b"added\n")
    os.write(writer, b"ond\n")
    os.close(writer)
    log.close()
    assert (tmp_path / "role-0.log").read_bytes() == b"first\nadded\nsecond\n"
