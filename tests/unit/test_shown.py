"""Texts that others wrote, on their way to the terminal: shown as they are, whatever is in them, and never an order to it."""

from __future__ import annotations

import argparse
import ast
import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher import cli
from launcher.commands import samples, scale, simulate
from launcher.commands.status import UNREACHABLE
from launcher.commands.status import render as status_tables
from launcher.view import View
from runtime.cluster.nodes import Scaled
from runtime.errors import ServiceFault, UserError
from runtime.evaluation import table
from runtime.evaluation.results import EvaluationResult, Lengths, SetResult
from runtime.process.command_line import CommandParser
from runtime.status import Progress, Status
from runtime.telemetry import summary
from runtime.telemetry.shown import shown
from runtime.types import PolicyVersion
from services import health_check
from tests.unit.test_rules import FILES, TREES, imports_of

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


def test_an_escape_can_be_read() -> None:
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


@given(TEXTS)
def test_the_status(text: str) -> None:
    told = Status(role="coordinator", name="coordinator", state="ready", detail=text or "-", rates={text: 1.0})
    lost = Status(role="trainer", name=text, state=UNREACHABLE, detail=text)
    check(text, printed(lambda console: console.print(status_tables([told, lost], [0, 0]))))


@given(TEXTS)
def test_the_samples(text: str) -> None:
    row = samples.SampleRow(
        group=0,
        sample=0,
        step=1,
        state="dropped",
        why=text,
        prompt=text,
        reply=text,
        label=text,
        reward=1.0,
        valid=True,
        rules={text: 1.0},
        finish="stop",
        tokens=1,
        versions=("0.1", "0.1"),
        logprob=0.0,
    )
    check(text, printed(lambda console: console.print(samples._table([row]))))


@given(TEXTS)
def test_the_summary_of_a_run_and_of_an_evaluation(text: str) -> None:
    totals = summary.Totals().summary(
        rl_seconds=1.0,
        stop_reason=text,
        accuracy_before=None,
        accuracy_after=None,
        total_seconds=1.0,
        startup={},
        startup_processes={},
        groups={"dropped": 1},
        dropped={text: 1},
        peak_pss_bytes=0,
    )
    check(text, printed(lambda console: console.print(summary.render(totals))))
    found = evaluated(text)
    check(text, printed(lambda console: console.print(table.render([found]))))


def evaluated(text: str) -> EvaluationResult:
    found = SetResult(
        name=text,
        path="",
        problems=1,
        samples=1,
        scored=1,
        pass_at={1: 1.0},
        maj_at={},
        standard_error=None,
        lengths=Lengths(mean=1.0, median=1.0, p95=1.0, max=1, truncated=0.0),
        errors={text: 1},
        notes=[text],
    )
    version = PolicyVersion()
    return EvaluationResult(model="", step=1, accuracy=1.0, seconds=1.0, oldest=version, newest=version, sets=[found])


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


@given(TEXTS)
def test_what_a_simulation_says(text: str) -> None:
    prediction = mock.Mock(roles=[mock.Mock(role=text, processes=1, busy=0.5, waits=text)])
    seen = prediction.observed
    seen.samples_per_second, seen.staleness = 1.0, 0.0
    seen.idle, seen.seconds = {"trainer": 0.0, "rollout": 0.0}, {"step": 1.0}
    rows = [simulate.Row(text, prediction), simulate.Row("other", None, text)]
    check(text, printed(lambda console: console.print(simulate._roles(prediction), simulate._table(rows))))


@given(TEXTS)
def test_what_was_scaled(text: str) -> None:
    async def answer(*_: object) -> Scaled:
        return Scaled(started=[text])

    with mock.patch.object(scale.session, "call", answer), redirect_stdout(io.StringIO()) as output:
        scale.run(argparse.Namespace(run="localhost:1", wanted="rollout=1"))
    check(text, output.getvalue())


def test_whatever_is_composed_is_printed_as_text() -> None:
    """An f-string goes to a terminal by `say`, `literal` or `shown`. What a check prints, `sluice accept` reads."""
    bare = [
        f"{file}:{node.lineno}"
        for file, tree in TREES.items()
        if file not in ("launcher/accept/worker.py", "runtime/telemetry/shown.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "print"
        and any(isinstance(argument, (ast.JoinedStr, ast.Starred)) for argument in node.args)
    ]
    tables = [file for file in FILES if "rich.table.Table" in imports_of(file)]
    assert (bare, tables) == ([], [])


@pytest.mark.parametrize(("error", "code"), [(UserError(f"{GLOO} {HOSTILE}"), 2), (ServiceFault("a", "b", GLOO + HOSTILE), 1)])
def test_errors(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise error

    assert cli.run_and_report(work) == code
    output = capsys.readouterr().err
    assert not FORBIDDEN.search(output) and GLOO in output and "\\x1b]52" in output
