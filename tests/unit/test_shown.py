"""What commands say: of arguments that are missing or cannot be, in tables and lines, and texts that others wrote, which are
shown as they are, whatever is in them, and never an order to the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher import cli
from launcher.accept.checks import placement
from launcher.commands import samples
from launcher.commands.status import UNREACHABLE
from launcher.commands.status import render as status_tables
from launcher.view import View
from runtime.config import Config
from runtime.config.loading import load, resolve
from runtime.errors import ServiceFault
from runtime.models import tiny_model
from runtime.process.os_process import CommandParser
from runtime.status import Progress, Status
from runtime.telemetry.shown import shown
from services import health_check
from tests.unit.source_tree import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:10982"


HOSTILE = "\x1b]0;title\x07\x1b]52;c;aGk=\x1b\\\x1b[2J\x9b31m\x7f\r\x00"


TEXTS = st.one_of(
    st.text(max_size=60),
    # What markup, emoji codes, escapes and changes of direction are made of.
    st.text(st.sampled_from("[]/\\= \x1b\x9b\u202e\u2066:a1#\n\t"), max_size=60),
    st.sampled_from([GLOO, HOSTILE, "[/]", "[bold]x[/bold]", ":smile:", "[link=x]", "\\[/x]"]),
)


FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printed(show: Callable[[Console], object], terminal: bool = False) -> str:
    """What `show` gives to a terminal as wide as it needs, or a pipe, without what rich itself moves its bars with."""
    out = io.StringIO()
    show(Console(file=out, width=1000, force_terminal=terminal, color_system=None, legacy_windows=False))
    return re.sub(r"\x1b\[(\?25[lh]|\d*[AK])|\r", "", out.getvalue()) if terminal else out.getvalue()


def squeezed(text: str) -> str:
    """Without what tables fold and pad with."""
    return re.sub(r"[\s│]", "", text)


def check(text: str, output: str) -> None:
    assert not FORBIDDEN.search(output)
    told = squeezed(output)
    for line in shown(text).split("\n"):  # beside each of which another column may have one
        assert squeezed(line) in told


@given(TEXTS)
def test_control_characters_are_written_as_escapes_and_all_else_stays(text: str) -> None:
    assert not FORBIDDEN.search(shown(text))
    if not FORBIDDEN.search(text):
        assert shown(text) == text
    assert shown("a\x1b[2J\x9b\r\n\tb\udc80") == "a\\x1b[2J\\x9b\\x0d\n\tb\\udc80"


@given(TEXTS, st.booleans())
def test_the_view(text: str, terminal: bool) -> None:
    def show(console: Console) -> None:
        with View(console, line_interval=0.0) as view:
            view.progress(Progress(phase="recovering", detail=text))
            view.say(text)
            view.output(text, text)

    output = printed(show, terminal)
    assert not FORBIDDEN.search(output)
    assert output.count(GLOO) >= 3 or text != GLOO
    check(text, output)


def of_status(text: str) -> list[object]:
    told = Status(role="coordinator", name="coordinator", state="ready", detail=text or "-", rates={text: 1.0})
    lost = Status(role="trainer", name=text, state=UNREACHABLE, detail=text)
    return [status_tables([told, lost], [0, 0])]


def of_samples(text: str) -> list[object]:
    given = {"state": "dropped", "why": text, "prompt": text, "reply": text, "label": text, "rules": {text: 1.0}}
    rest: dict[str, Any] = {"reward": 1.0, "valid": True, "finish": "stop", "tokens": 1, "versions": ("0.1", "0.1")}
    return [samples._table([samples.SampleRow(group=0, sample=0, step=1, logprob=0.0, **given, **rest)])]


@pytest.mark.parametrize("made", [of_status, of_samples])
@given(text=TEXTS)
def test_tables(made: Callable[[str], list[object]], text: str) -> None:
    check(text, printed(lambda console: console.print(*made(text))))


CHILD = """
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from launcher import cli
from runtime.errors import UserError
from runtime.telemetry import summary
from runtime.telemetry.shown import say


def work():
    print("begun", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        Console().print(summary.render(msgspec.json.decode(sys.argv[2], type=summary.Summary)))
        say(Console(), "0 \u2192 1 \u2026 \u4e2d")
        print("0 \u2192 1", flush=True)
        sys.stdout.writelines(["\u2192\\n"] * 3)
    Path(sys.argv[1], "done").touch()
    raise UserError("a \u2192 b")


sys.exit(cli.run_and_report(work, sys.argv[3] == "shows"))
"""
COUNTS = {"stop_reason": "all \u2192 done", "steps": 2, "accuracy_before": 0.1, "accuracy_after": 0.2, "groups": {"trained": 2}}
COUNTS |= {"startup": {"load": 1.0}, "staleness_histogram": {"0": 2}, "timing": {"all": 2.0}, "peak_pss_bytes": 1 << 20}
RATES = ["rl_seconds", "total_seconds", "samples_per_second", "tokens_per_second", "staleness_mean"]


@pytest.mark.parametrize("console", ["ascii", "latin-1", "reader gone", "reader gone, shows", "closed"])
def test_no_console_ends_a_command(console: str, tmp_path: Path) -> None:
    """One that lacks a character, whose reader goes, or that is not there. What only shows something ends with its reader."""
    told = json.dumps(COUNTS | dict.fromkeys(RATES, 1.0) | {"staleness_max": 0, "idle_trainer": 0.0, "idle_rollout": 0.0})
    command = [sys.executable, "-c", CHILD, str(tmp_path), told, console.partition(", ")[2]]
    if console == "closed":
        command = ["sh", "-c", 'exec "$0" "$@" >&-', *command]
    encoding = console if console in ("ascii", "latin-1") else "utf-8"
    child = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stdout and child.stderr
        begun = child.stdout.readline()
        if console.startswith("reader gone"):
            child.stdout.close()
            child.stdout = None
        out, error = child.communicate(b"\n", timeout=60)
    ended = console == "reader gone, shows"
    assert begun == (b"" if console == "closed" else b"begun\n")
    assert (child.returncode, (tmp_path / "done").exists()) == ((0, False) if ended else (2, True))
    told = error.decode(encoding)
    assert told in (("",) if ended else ("error: a \\u2192 b\n", "error: a → b\n"))
    if encoding != "utf-8":
        assert "all ? done" in out.decode(encoding) and "0 ? 1" in out.decode(encoding)


@given(TEXTS)
def test_mistakes_faults_and_what_a_health_check_is_told(text: str) -> None:
    def work() -> int:
        raise ServiceFault("rollout-0", "Generate", text)

    output = io.StringIO()
    with redirect_stderr(output):
        assert cli.run_and_report(work) == 1
        with suppress(SystemExit):
            CommandParser(prog="sluice").error(text)
        with mock.patch.object(health_check, "check", lambda *_: (False, text)):
            health_check.main(["localhost:1"])
    check(text, output.getvalue())
    assert output.getvalue().count(shown(text)) >= 3


WAITING = [Progress(phase="starting", detail=detail) for detail in ("", "waits for b", "waits for b", "waits for c", "")]
PHASES = ["starting", *(Progress(phase="training", done=done, total=2) for done in (0, 0, 1)), "starting"]
ALARMS = [Progress(phase="training", done=1, total=2, alarm=alarm) for alarm in ("", "it differs", "it differs")]


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        (WAITING, ["starting", "starting  waits for b", "starting  waits for c"]),
        (PHASES, ["starting", "training  0/2", "training  1/2", "starting"]),
        (ALARMS, ["training  1/2", "ALARM: it differs"]),
    ],
)
def test_what_goes_on_unchanged_is_one_line(told: list[Any], lines: list[str]) -> None:
    out = io.StringIO()
    with View(Console(file=out, width=80), **({"line_interval": 0.0} if told is PHASES else {})) as view:
        for each in told:
            view.phase(each) if isinstance(each, str) else view.progress(each)
    assert [line.strip() for line in out.getvalue().splitlines()] == lines


def ended(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return end.value.code or 0


MISTAKES = {
    "train": "the following arguments are required: config; see sluice train --help$",
    "render slurm": "the following arguments are required: config; see sluice render slurm --help$",
    "": "the following arguments are required: COMMAND",
    "trian": r"argument COMMAND: invalid choice: 'trian' \(choose from '?quickstart'?, '?train'?, ",
    "tune": "tune: no longer a command: write sft",
    "bench nothing": r"argument name: invalid choice: 'nothing' \(choose from '?all'?, ",
    "samples runs/a --limit few": "argument --limit: invalid int value: 'few'",
    "status runs/a --wach": "unrecognized arguments: --wach",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_that_names_argument_and_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{MISTAKES[command]}", line)


def test_validate_finds_what_files_of_ones_own_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("from runtime.rewards.rules import rule\n@rule('mine_alone')\ndef mine(*_): return 1.0\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")

    names = [f"rewards.rules.1.name={tmp_path}/mine.py:mine_alnoe", f"algorithm.loss={tmp_path}/broken.py:mine"]
    assert ended(["validate", str(QUICKSTART), *names]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("error: algorithm.loss: ")
    assert said[0].endswith("broken.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'")
    told = f"unknown name 'mine_alnoe'; did you mean 'mine_alone'? {tmp_path}/mine.py neither registers nor defines it"
    assert said[1] == f"error: rewards.rules.1.name: {told}"
    assert ended(["validate", str(QUICKSTART), f"rewards.rules.1.name={tmp_path}/mine.py:mine_alone"]) == 0


def test_validate_reads_the_tokenizer_with_its_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.described("tiny:qwen2")))
    (tmp_path / "model.safetensors").touch()

    arguments = ["validate", str(QUICKSTART), f"model.path={tmp_path}"]
    assert ended(arguments) == 0
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert ended(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: data.prompt_type: {tmp_path} has no chat template, which 'model' needs")
    assert ended([*arguments, "data.prompt_type=qwen"]) == 0


def test_validate_names_the_defaults_that_were_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["validate", str(QUICKSTART), "training.depth=bound"]) == 0
    assert "version 0.1" not in capsys.readouterr().out
    assert ended(["validate", str(QUICKSTART), "--since", "0.1", "training.depth=bound"]) == 0
    said = capsys.readouterr().out
    assert "training.lr_staleness_power: 0.5 by default; version 0.1 did what 0.0 does\n" in said
    assert said.count("version 0.1 did") == 2  # the quickstart says itself how often it saves


def test_the_quickstart_trains_its_own_configuration_and_says_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[Config] = []
    monkeypatch.setattr("launcher.commands.train.run_training", lambda config, *_: trained.append(config))
    monkeypatch.chdir(tmp_path)
    overrides = ["training.steps=3", "run.dir=my runs/first"]
    assert ended(["quickstart", *overrides]) == 0
    assert trained == [resolve(load(QUICKSTART, overrides))]
    said = capsys.readouterr().out.splitlines()
    files = [f"my runs/first/{name}" for name in ("model", "metrics.jsonl", "summary.json", "logs")]
    assert [line.split("  ")[1] for line in said[:4]] == files
    commands = [shlex.split(line)[1:] for line in said[4:]]
    assert {command[0] for command in commands} == {"samples", "report", "page", "why", "quickstart"}
    for words in commands:
        options = cli._parser().parse_known_args(words)[0]
        assert "my runs/first" in map(str, vars(options).values()) or options.write == Path("my.yaml")
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out == f"sluice {version('sluice-rl')}\n"


def test_a_single_accelerator_publishes_over_gloo_and_several_are_kept_apart() -> None:
    assert placement("cpu", 1) == ["weight_sync.backend=gloo"]
    assert {"weight_sync.backend=gloo", "services.rollout.colocate=trainer"} < set(placement("npu", 1))
    two = placement("cuda", 2)
    assert two[:2] == ["services.rollout.replicas=1", "services.rollout.devices=[1]"]
    assert placement("npu", 16)[:2] == ["services.rollout.replicas=2", "services.rollout.devices=[1, 2]"]
    assert "weight_sync.backend=gloo" not in two and "weight_sync.transport=collective" in two
