"""What reads a run's folder: nothing of it is executed, and a damaged file is a line, whichever and however."""

from __future__ import annotations

import copy
import io
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from benchmarks.recorded_run import record
from launcher import cli
from launcher.page.samples import SampleFilter, SampleReader
from launcher.page.server import Pages
from launcher.page.views import RunView
from runtime import run_files
from runtime.config import yaml_text
from runtime.config.yaml_text import DEEPEST, MOST_BYTES, dump, read_mapping, read_value
from runtime.errors import ConfigError, SluiceError, UserError
from runtime.evaluation import results
from runtime.simulation.calibration import LEAST
from runtime.telemetry.startup import Startup

DAMAGES = 200
STEPS = 2
MARKED = "executed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one, which has every kind of file."""
    folder = record(tmp_path_factory.mktemp("readers") / "run", STEPS)
    Startup(phases={"services": 1.0}, processes={"trainer-0": {"load": 1.0}}).write(folder)
    lengths = {"mean": 1.0, "median": 1.0, "p95": 1.0, "max": 1, "truncated": 0.0}
    of_set = {"name": "s", "path": "p", "problems": 1, "samples": 1, "scored": 1, "pass@k": {1: 1.0}, "maj@k": {1: 1.0}}
    of_set |= {"standard_error": None, "lengths": lengths, "errors": {}}
    reply = {
        "set": "s",
        "problem": "1",
        "sample": 0,
        "prompt": "p",
        "reply": "r",
        "label": "l",
        "answer": None,
        "correct": True,
    }
    reply |= {"reward": 1.0, "rules": {}, "tokens": 1, "finish": "stop", "versions": ["0.0", "0.0"], "logprob": None}
    for step in range(STEPS):
        place = results.folder_for(folder, step)
        place.mkdir(parents=True)
        found = {
            "model": "m",
            "step": step,
            "accuracy": 1.0,
            "seconds": 1.0,
            "oldest": [0, 0],
            "newest": [0, 0],
            "sets": [of_set],
        }
        (place / results.RESULTS).write_bytes(msgspec.json.encode(found))
        (place / f"s{results.SUFFIX}").write_bytes(msgspec.json.encode(reply) + b"\n")
    numbers = "steps rl_seconds total_seconds samples_per_second tokens_per_second staleness_mean staleness_max"
    numbers += " idle_trainer idle_rollout peak_pss_bytes"
    summary: dict[str, Any] = {"stop_reason": "steps", "accuracy_before": None, "accuracy_after": None}
    summary |= dict.fromkeys(numbers.split(), 0) | {name: {} for name in ("startup", "staleness_histogram", "groups", "timing")}
    (folder / run_files.SUMMARY).write_bytes(msgspec.json.encode(summary))
    (folder / run_files.LOGS).mkdir()
    (folder / run_files.LOGS / "trainer-0.log").write_text("a line\n")
    return folder.parent


def commands(folder: Path, output: Path) -> Iterator[list[str]]:
    run = str(folder)
    yield ["why", run]
    yield ["trace", run, "--output", str(output)]
    yield ["samples", run]
    yield ["samples", run, "--eval"]
    for command in (["status"], ["status", "--gateway"], ["scale", "rollout=1"], ["profile"]):
        yield [command[0], run, *command[1:]]


def views(folder: Path) -> Iterator[Callable[[], Any]]:
    view, samples = RunView(folder), SampleReader(folder)
    names = ("summary", "occupancy", "weights", "evaluations", "processes", "waited", "spans")
    yield from (getattr(view, name) for name in names)
    yield from (
        lambda: view.why(None, None),
        lambda: view.lanes(None, None, 100),
        lambda: view.metric("score/mean"),
        lambda: view.configuration(None),
    )
    yield from (lambda: samples.index(SampleFilter()), lambda: samples.rows([0, 1]), lambda: samples.group(0))


def said(command: list[str]) -> tuple[int, list[str]]:
    """Exit code, and lines of standard error."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        cli.main(command)
    return int(ended.value.code or 0), errors.getvalue().splitlines()


def damaged(path: Path, how: str, chance: random.Random) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: chance.randrange(max(1, len(data)))])
    elif how == "zeros":
        path.write_bytes(bytes(len(data)))
    elif how == "flipped":
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 8, 200))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
    elif how == "another":
        path.write_bytes(
            chance.choice((b"", b"{}", b"[]\n", b"null\n", b'"text"', b"\xff\xfe" * 600, b"[" * 2000, b"SQLite format 3\x00"))
        )
    else:
        path.unlink()
        path.mkdir() if how == "folder" else path.symlink_to("/dev/zero") if how == "endless" else os.mkfifo(path)


def test_nothing_that_a_folder_names_is_executed(tmp_path: Path) -> None:
    folder, own, mark = tmp_path / "runs" / "run", tmp_path / "runs" / "evil.py", tmp_path / "runs" / "executed"
    record(folder, LEAST)
    own.write_text(f"open({str(mark)!r}, 'w')\ndef given(*_, **__): return 0\n")
    settings = read_value((folder / run_files.CONFIG).read_bytes())
    name = f"{own}:given"
    settings["algorithm"] |= dict.fromkeys(("advantage", "loss", "correction", "aggregation", "kl"), name)
    settings["data"]["handler"] = name
    settings["rewards"] = {"rules": [{"name": name}]}
    settings["evaluation"] |= {"sets": [{"name": "s", "path": str(own), "handler": name}]}
    (folder / run_files.CONFIG).write_text(dump(settings))
    (folder / run_files.ADDRESS).write_text("127.0.0.1:1")
    for read in (*views(folder), RunView(folder).what_if, RunView(folder).curves, Pages(folder.parent).list):
        with suppress(SluiceError):
            read()
    with pytest.raises(UserError, match=r"evil\.py:given: not executed; name it in CONFIG"):
        RunView(folder).what_if()
    plain = tmp_path / "plain.yaml"
    plain.write_text("run: {name: plain}\nmodel: {path: toy}\ndata: {path: x}\n")
    more = ["report", str(folder), "--output", str(tmp_path / "r.html")], ["simulate", str(plain), "--from", str(folder)]
    codes = {command[0]: said(command)[0] for command in (*commands(folder, tmp_path / "t.json"), *more)}
    assert not mark.exists() and codes["why"] == codes["report"] == 0 and codes["simulate"] == 2, codes


def test_what_is_no_file_of_the_folder_is_not_read(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole / "run", folder)
    (tmp_path / "secret").write_text("a secret\n")
    (folder / run_files.LOGS / "other.log").symlink_to(tmp_path / "secret")
    (folder / run_files.LOGS / "linked.log").symlink_to("trainer-0.log")
    os.mkfifo(folder / run_files.LOGS / "pipe.log")
    (folder / run_files.LOGS / "zero.log").symlink_to("/dev/zero")
    assert set(RunView(folder).processes()["logs"]) == {"trainer-0.log", "linked.log"}
    gateways = folder / run_files.GATEWAYS
    gateways.mkdir()
    (folder / run_files.ADDRESS).write_text("127.0.0.1:1")
    run_files.write_private(folder / run_files.SECRET, "00" * 32)
    for written, right in {
        "http://10.0.0.1:80": True,
        "https://[::1]:9\n": True,
        "http://x $(touch x)": False,
        "ftp://x:1": False,
    }.items():
        (gateways / "gateway-0").write_text(written)
        code, lines = said(["status", str(folder), "--gateway"])
        assert (code == 0) is right and len(lines) == (not right), (written, lines)


def test_yaml_is_bounded_before_it_is_read() -> None:
    for text, why in (
        ("[" * 100_000, "within each other"),
        ("a: " + "x" * MOST_BYTES, "bytes; must be at most"),
        ("{a: " * 200, "within"),
    ):
        with pytest.raises(yaml.YAMLError, match=why):
            read_value(text)
    ours, theirs = os.pipe()
    os.write(theirs, b"a: 1")
    os.close(theirs)
    assert read_mapping(Path(f"/dev/fd/{ours}")) == {"a": 1}, "a pipe of the user's own shell"
    os.close(ours)
    with pytest.raises(ConfigError, match="bytes; must be at most"):
        read_mapping(Path("/dev/zero"))
    assert read_value("[" * DEEPEST + "]" * DEEPEST)


def faults(folder: Path, output: Path, number: int) -> Iterator[str]:
    """Of readers of `folder`, one of whose two runs is damaged: half of the views, a quarter of the commands."""
    for read in [*views(folder / "run")][number // 4 % 2 :: 2]:
        try:
            read()
        except SluiceError:
            pass
        except Exception as error:  # noqa: BLE001 - it is told
            at = traceback.extract_tb(error.__traceback__)[-1]
            yield f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"
    try:
        if {each["id"]: each for each in Pages(folder).list()}["sound"].get("steps") != STEPS:
            yield "the sound run is not shown"
    except Exception as error:  # noqa: BLE001 - it is told
        yield f"list: {error!r}"
    for command in [*commands(folder / "run", output)][number % 4 :: 4]:
        try:
            code, lines = said(command)
        except Exception as error:  # noqa: BLE001 - it is told
            yield f"{command}: {error!r}"
        else:
            if code and not all(line.startswith("error: ") for line in lines):
                yield f"{command}: {lines}"


def test_a_damaged_file_is_told_in_a_line_and_others_runs_are_shown(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, parser = cache(yaml_text.read_value), cli._parser()  # which take most of the time
    monkeypatch.setattr(yaml_text, "read_value", lambda *given: copy.deepcopy(read(*given)))
    monkeypatch.setattr(cli, "_parser", lambda: parser)
    chance, found, runs = random.Random(6), list[str](), tmp_path / "runs"
    for name in ("run", "sound"):
        shutil.copytree(whole / "run", runs / name)
    files = sorted(path.relative_to(runs) for path in (runs / "run").rglob("*") if path.is_file() and path.stat().st_size)
    ways = ("cut", "flipped", "flipped", "zeros", "another", "folder", "endless", "pipe")
    for number in range(DAMAGES):
        path, how = runs / files[number % len(files)], ways[(number // len(files) + number) % len(ways)]
        kept = path.read_bytes()
        damaged(path, how, chance)
        found += [
            f"{number}: {path.relative_to(runs)} {how}: {fault}" for fault in faults(runs, tmp_path / "trace.json", number)
        ]
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(kept)
    assert not found, "\n".join(found)
