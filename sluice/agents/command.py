"""A command of any language as an agent. The standard library alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.agents.episode import DataError, Episode, InfrastructureError

LONGEST = 1 << 16  # bytes of the longest text that a variable holds
TAIL = 1 << 20  # bytes at the end of a command's output that may have its reward
COLUMN = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z_0-9]*)\}")
PIECE = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|""" + COLUMN.pattern, re.DOTALL)


class CommandAgent:
    """`CommandAgent("solve", "--ask", "{question}")`: a program with its arguments; or one text, a line for the shell.
    `{question}` stands for the column of the row. `check`: a command that judges the first; exit code 0 gives 1, else 0.

    Both find the gateway as programs that know OpenAI's or Anthropic's API do. The task is on standard input, in SLUICE_TASK
    and in the file SLUICE_TASK_FILE. The reward is in the last line of output that is a number or has `{"reward": number}`."""

    def __init__(self, *command: str, check: str | Sequence[str] = (), env: Mapping[str, str] | None = None):
        """Create the agent. `env`: variables of both commands, besides this process's own."""
        if not command:
            raise ValueError("CommandAgent: names no program")
        self._command, self._env = command, dict(env or {})
        self._check = (check,) if isinstance(check, str) and check else tuple(check)

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> float | None:
        with tempfile.TemporaryDirectory(prefix="sluice-") as name:
            folder = Path(name)
            (folder / "task.json").write_text(json.dumps(data), encoding="utf-8")
            env = {**os.environ, **variables(data, episode), "SLUICE_TASK_FILE": f"{folder}/task.json", **self._env}
            code = await _ended(filled(self._command, data), env, folder / "output")
            if code != 0:
                episode.stop_reason = "tool_failed"
            found = reward_of(_tail(folder / "output"))
            if self._check:
                env["SLUICE_OUTPUT_FILE"] = f"{folder}/output"
                code = await _ended(filled(self._check, data), env, folder / "judgement")
                judged = reward_of(_tail(folder / "judgement"))
                return float(code == 0) if judged is None else judged
            if found is None and code != 0:
                raise InfrastructureError(f"{self._command[0]} ended with exit code {code} and no reward")
            return found


def variables(data: Mapping[str, Any], episode: Episode) -> dict[str, str]:
    """Return a program's variables for the gateway and the task; a column is in SLUICE_ROW_ and its name."""
    key, task = episode.api_key, json.dumps(data)
    found = {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": episode.root}
    found |= {"ANTHROPIC_API_KEY": key, "ANTHROPIC_AUTH_TOKEN": key, "SLUICE_SEED": str(episode.seed)}
    columns = {f"SLUICE_ROW_{name}": _text(value) for name, value in data.items()}
    found |= {name: text for name, text in columns.items() if len(text) <= LONGEST}
    return found | ({"SLUICE_TASK": task} if len(task) <= LONGEST else {})


def filled(command: Sequence[str], data: Mapping[str, Any]) -> list[str]:
    """Return the arguments, with the columns in place of their names. In a line for the shell a name becomes a quoted reference
    to a variable. The shell never reads the variable's text as a command. Raises DataError for a column that the row lacks,
    ValueError for a name that is quoted in such a line."""

    def text(match: re.Match[str]) -> str:
        if match[1] not in data:
            raise DataError(f"{match[0]}: the row has no such column; it has {', '.join(data)}")
        return _text(data[match[1]])

    def reference(match: re.Match[str]) -> str:
        if match[1]:
            text(match)
            return f'"$SLUICE_ROW_{match[1]}"'
        if any(name in data for name in COLUMN.findall(match[0])):
            raise ValueError(f"{match[0]}: leave out the quotes; a column comes with its own")
        return match[0]

    if len(command) == 1:
        return ["sh", "-c", PIECE.sub(reference, command[0])]
    program = sys.executable if command[0] == "python" else COLUMN.sub(text, command[0])
    return [program, *(COLUMN.sub(text, argument) for argument in command[1:])]


def reward_of(output: str) -> float | None:
    """Return the number of the last line that is a number, or an object with a number as its `reward`. None if no line is."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            value = value.get("reward") if isinstance(value, dict) else value
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace")


async def _ended(command: Sequence[str], env: Mapping[str, str], output: Path) -> int:
    """Run the command and return its exit code. Processes that it started end too, unless they left the process group."""
    with open(env["SLUICE_TASK_FILE"], "rb") as task, output.open("wb") as file:  # noqa: ASYNC230, PTH123 - small and local
        process = await asyncio.create_subprocess_exec(*command, stdin=task, stdout=file, env=env, start_new_session=True)
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
