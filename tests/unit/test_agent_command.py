"""A command as an agent: its arguments from a row, and its reward from what it printed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from sluice.agents.command import LONGEST, CommandAgent, filled, reward_of, variables
from sluice.agents.episode import DataError, Episode

HOSTILE = """$(echo no) `echo no` "; echo no #' \\ {other}"""


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ('{"reward": 0.5}', 0.5),
        ('{"reward": 1}\nthanks\n', 1.0),
        ("0\n1\n", 1.0),
        ("-2.5", -2.5),
        ('{"reward": 1}\n{"score": 3}\n', 1.0),
        ("true\nnull\n[1]\n{\n", None),
        ('{"reward": "1"}', None),
        ("", None),
    ],
)
def test_the_last_line_that_is_a_reward_counts(output: str, reward: float | None) -> None:
    assert reward_of(output) == reward


def test_columns_are_filled_into_arguments() -> None:
    row = {"question": HOSTILE, "other": [1, "ä"]}
    assert filled(["solve", "--ask={question}", "{other}", "${HOME} {}"], row) == [
        "solve",
        f"--ask={HOSTILE}",
        '[1, "ä"]',
        "${HOME} {}",
    ]
    assert filled(["python", "python"], row) == [sys.executable, "python"]


@pytest.mark.parametrize("line", ["printf %s {question}", "cat <<END\n{question}\nEND", "echo `printf %s {question}`"])
def test_the_shell_never_runs_what_a_row_says(line: str) -> None:
    row = {"question": HOSTILE}
    env = {"SLUICE_ROW_question": HOSTILE, "PATH": "/usr/bin:/bin"}
    told = subprocess.run(filled([line], row), env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert HOSTILE.split()[-1] in told and told.strip().strip('"') == HOSTILE


def test_a_line_for_the_shell_keeps_its_own_braces() -> None:
    line = """{ echo ${HOME}; awk '{print}' "{a,b}"; }"""
    assert filled([line], {"question": "x"}) == ["sh", "-c", line]


@pytest.mark.parametrize("line", ["echo '{question}'", 'echo "is {question}"'])
def test_a_column_within_quotes_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="leave out the quotes"):
        filled([line], {"question": "x"})


@pytest.mark.parametrize("command", [["echo {answer}"], ["echo", "{answer}"]])
def test_a_column_that_is_not_there_is_the_rows_fault(command: list[str]) -> None:
    with pytest.raises(DataError, match=r"\{answer\}: the row has no such column; it has question"):
        filled(command, {"question": "x"})


def begun() -> Any:
    told: dict[str, Any] = {"id": "e1", "task": {}, "base_url": "http://gateway/episodes/e1", "api_key": "key", "seed": 3}
    return Episode({**told, "purpose": "train", "call_seconds": 1.0}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("line", "stop_reason"), [("true", ""), ("false", "tool_failed")])
def test_a_program_that_failed_is_judged_and_told_apart(line: str, stop_reason: str) -> None:
    episode = begun()
    assert asyncio.run(CommandAgent(line, check="test -f $SLUICE_OUTPUT_FILE").run({}, episode=episode)) == 1.0
    assert episode.stop_reason == stop_reason


def test_what_a_program_is_told_of_the_gateway() -> None:
    episode = begun()
    found = variables({"question": "x", "long": "y" * (LONGEST + 1)}, episode)
    assert found == {
        "OPENAI_BASE_URL": "http://gateway/episodes/e1/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": "http://gateway/episodes/e1",
        "ANTHROPIC_API_KEY": "key",
        "ANTHROPIC_AUTH_TOKEN": "key",
        "SLUICE_SEED": "3",
        "SLUICE_ROW_question": "x",
    }
    assert variables({"question": "x"}, episode)["SLUICE_TASK"] == '{"question": "x"}'


def test_a_command_has_a_name() -> None:
    with pytest.raises(ValueError, match="names no program"):
        CommandAgent()
