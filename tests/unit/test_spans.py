"""The file of a process's spans: what it holds, what it leaves out, and how it is read while it is written."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from runtime import config, run_files
from runtime.config import Config
from runtime.process import spans
from runtime.process.spans import CALLS, LineStates, SpanFolder, SpanLog, TracedSpan, joined


def opened(folder: Path, most_bytes: int = 1 << 20, process: str = "rollout-0") -> SpanLog:
    log = SpanLog()
    log.open(Config(run=config.Run(name="test", dir=str(folder)), logs=config.Logs(span_bytes=most_bytes)), process)
    return log


class FullDisk:
    """A file on a disk that has no room until `room`; a write of a part is all that it takes."""

    def __init__(self, file: Any):
        self._file, self.room = file, False

    def write(self, line: bytes) -> int:
        return int(self._file.write(line if self.room else line[:5]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def read(folder: Path) -> SpanFolder:
    files = SpanFolder(folder)
    files.follow()
    return files


def test_what_was_added_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLUICE_INCARNATION", "2")
    log, now = opened(tmp_path), time.monotonic()
    log.add("decode", now - 2, now - 1, "engine")
    log.add("Generate", now - 2, now, CALLS, 7, 5, "why ☃\n")
    log.close()
    (file,) = read(tmp_path).files.values()
    assert (file.header.process, file.header.rank, file.header.incarnation, file.header.dropped) == ("rollout-0", 3, 2, 0)
    decode, generate = file.spans
    assert (decode.name, decode.line, decode.group, decode.step) == ("decode", "engine", -1, -1)
    assert generate[3:] == (CALLS, 7, 5, "why ☃\n")
    # Both clocks are read one after the other, in an interval that holds this one.
    assert decode.end - decode.start == pytest.approx(1.0, abs=1e-6)
    assert generate.start == decode.start


def test_a_log_that_is_not_open_takes_nothing(tmp_path: Path) -> None:
    for log in (SpanLog(), opened(tmp_path, 0)):
        log.add("decode", 0.0, 1.0)
        with log.span("gather"):
            pass
        log.close()
    assert not (tmp_path / run_files.SPANS).exists()


def test_a_folder_that_cannot_be_written_costs_the_spans_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / run_files.SPANS).write_text("")
    log = opened(tmp_path)
    log.add("decode", 0.0, 1.0)
    log.close()
    assert "no spans of rollout-0" in caplog.text


def test_what_does_not_fit_is_dropped_the_newest_and_counted(tmp_path: Path) -> None:
    most = 4096
    log = opened(tmp_path, most)
    for number in range(200):
        log.add(f"phase-{number}", number, number + 0.5)
    log.close()
    (file,) = read(tmp_path).files.values()
    assert file.path.stat().st_size <= most
    assert [span.name for span in file.spans] == [f"phase-{number}" for number in range(len(file.spans))]
    assert 0 < len(file.spans) < 200
    assert file.header.dropped == 200 - len(file.spans)


def test_a_file_is_followed_and_a_torn_line_left_out(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.add("one", 0.0, 1.0)
    log.close()
    files = read(tmp_path)
    (file,) = files.files.values()
    with file.path.open("ab") as more:
        more.write(b'["two",1.0,2.0,"",-1,-1,""]\n["thr')
    files.follow()
    assert [span.name for span in file.spans] == ["one", "two"]
    with file.path.open("ab") as more:
        more.write(b'ee",2.0,3.0,"",-1,-1,""]\n["torn\n["four",3.0,4.0,"",-1,-1,""]\n')
    files.follow()
    assert [span.name for span in file.spans] == ["one", "two", "three", "four"]


def test_a_line_is_in_one_state_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    monkeypatch.setattr(spans, "log", log)
    states = LineStates()
    for line, state, detail in (("a", "placed", ""), ("b", "placed", ""), ("a", "lost", "signal 9"), ("a", "serving", "")):
        states.enter(line, state, detail)
    states.close()
    log.close()
    (file,) = read(tmp_path).files.values()
    told = sorted((span.line, span.start, span.name, span.detail) for span in file.spans)
    assert [(line, name, detail) for line, _, name, detail in told] == [
        ("a", "placed", ""),
        ("a", "lost", "signal 9"),
        ("a", "serving", ""),
        ("b", "placed", ""),
    ]


def test_what_only_a_short_gap_parts_is_one_span() -> None:
    def decode(start: float, end: float, detail: str = "") -> TracedSpan:
        return TracedSpan("decode", start, end, "engine", detail=detail)

    call = TracedSpan("Score", 0.0, 1.0, CALLS)
    spans = [decode(0, 1), call, decode(1.001, 2), decode(2.0, 3, "other"), call._replace(start=1.0), decode(2.01, 4)]
    assert joined(spans) == [decode(0, 2), call, decode(2.0, 3, "other"), call._replace(start=1.0), decode(2.01, 4)]
    alternating = [decode(0, 1), decode(1, 1.001, "other"), decode(1.001, 2)]
    assert joined(alternating) == alternating


def test_all_starts_of_a_process_together_have_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.process.spans.time.time", itertools.count(1.0).__next__)
    for _ in range(3):
        log = opened(tmp_path, 4000)
        for at in range(100):
            log.add(f"decode {at}", at, at + 0.5, CALLS)
        log.close()
    files = sorted(read(tmp_path).files.values(), key=lambda file: file.path.name)
    assert sum(file.path.stat().st_size for file in files) <= 4000 + 2 * 512, "a header tells of each start what it dropped"
    assert [len(file.spans) + file.header.dropped for file in files] == [100, 100, 100]
    assert len(files[0].spans) > 0


def test_a_disk_that_is_full_for_a_moment_costs_what_came_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    full = FullDisk(log._file)
    monkeypatch.setattr(log, "_file", full)
    log.add("lost", 1.0, 2.0, CALLS)
    log._flush()
    full.room = True
    log.add("kept", 2.0, 3.0, CALLS)
    log.close()
    (found,) = read(tmp_path).files.values()
    assert ([span.name for span in found.spans], found.header.dropped) == (["kept"], 1)


def test_files_of_a_run_that_was_replaced_are_forgotten(tmp_path: Path) -> None:
    folder = SpanFolder(tmp_path)
    log = opened(tmp_path)
    log.close()
    folder.follow()
    (only,) = folder.files.values()
    only.path.unlink()
    folder.follow()
    assert folder.files == {}
