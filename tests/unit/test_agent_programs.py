"""Programs that play: agents as commands and clients, adapters of other libraries, sluice play, sluice check-template."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from launcher import cli
from launcher.commands import evaluate
from launcher.node.local_node import LocalNode
from launcher.view import View
from runtime.config import Config
from runtime.config.loading import load
from runtime.data.handlers import load_problems
from runtime.errors import UserError
from runtime.evaluation.results import Generation
from runtime.gateway.rendering import conversations
from sluice.agents.command import LONGEST, CommandAgent, filled, reward_of, variables
from sluice.agents.conversation import opening
from sluice.agents.episode import DataError, Episode
from tests.unit import template_cases as cases

# ---- Parts of the adapters that need neither a gateway nor the packages that they are for

ROOT = Path(__file__).parents[2]
ADAPTERS = {
    "GymnasiumText": "gymnasium_text.py",
    "McpServer": "mcp_tools.py",
    "OpenEnvClient": "openenv_client.py",
    "TrlEnvironment": "trl_environment.py",
    "VerifiersTaskset": "verifiers_taskset.py",
}


def test_the_standard_library_is_enough_to_import_them_all() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import sluice.agents as a; [getattr(a, name) for name in a.__all__]"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_an_earlier_version_is_a_file_of_the_examples(name: str) -> None:
    assert f"class {name}" in (ROOT / "configs" / "agents" / ADAPTERS[name]).read_text()
    assert f"`configs/agents/{ADAPTERS[name]}`" in (ROOT / "docs" / "guides" / "agents.md").read_text()


def test_what_a_conversation_begins_with() -> None:
    asked = [{"role": "user", "content": "x"}]
    assert opening({"prompt": "x"}) == opening({"prompt": asked}) == opening({"messages": asked}) == asked
    assert opening({"prompt": "x"}, "Be short.") == [{"role": "system", "content": "Be short."}, *asked]
    with pytest.raises(DataError, match="neither messages nor a prompt; its columns are question"):
        opening({"question": "x"})


class Machine:
    """As TRL's documentation has an environment."""

    @property
    def state(self) -> str:
        raise AssertionError("nobody asked")

    def reset(self) -> None: ...

    def get_reward(self) -> float:
        return 0.0

    def push(self) -> str:
        return "pushed"

    def _own(self) -> None: ...


def test_the_public_methods_are_tools_and_what_reset_says_is_put_behind_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "configs" / "agents"))
    from trl_environment import methods_of, with_text

    assert [method.__name__ for method in methods_of(Machine())] == ["push"]
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert with_text(asked, " y") == [asked[0], {"role": "user", "content": "x y"}]
    assert with_text(asked, None) == asked and asked[1]["content"] == "x"
    assert with_text(asked[:1], "y") == [asked[0], {"role": "user", "content": "y"}]
    with pytest.raises(DataError, match="reset gave none"):
        with_text(asked[:1], None)


# ----
# The HTTP client that agents are given: what it imports is there before workers are forked, on a machine without IPv4 too.

FIRST_REQUEST = """
import asyncio, socket, sys
import httpx
from sluice.agents import worker as clients

clients.import_all()
before = set(sys.modules)

async def ask(port):
    async with clients.http_client() as client:
        try:
            await client.get(f"http://127.0.0.1:{port}")
        except httpx.ConnectError:
            print(sorted(set(sys.modules) - before))

with socket.socket() as deaf:
    deaf.bind(("127.0.0.1", 0))
    asyncio.run(ask(deaf.getsockname()[1]))
"""
WITHOUT_IPV4 = """
import socket
from sluice.agents import worker as clients

def bind(self, address):
    raise OSError(99, "Cannot assign requested address")

socket.socket = type("Socket", (socket.socket,), {"bind": bind})
clients.import_all()
print(clients.http_client() is not None)
"""


@pytest.mark.parametrize(("code", "said"), [(FIRST_REQUEST, "[]"), (WITHOUT_IPV4, "True")], ids=["first request", "no IPv4"])
def test_what_a_client_needs_is_imported(code: str, said: str) -> None:
    pytest.importorskip("httpx", reason="needs httpx: make install-dev")
    command, env = [sys.executable, "-c", code], {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


# ---- A command as an agent: its arguments from a row, and its reward from what it printed

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
    line = """{ echo ${HOME}; awk '{print}' "{a,b}"; }"""
    assert filled([line], {"question": "x"}) == ["sh", "-c", line]  # the shell's own braces stay
    with pytest.raises(ValueError, match="names no program"):
        CommandAgent()


@pytest.mark.parametrize("line", ["printf %s {question}", "cat <<END\n{question}\nEND", "echo `printf %s {question}`"])
def test_the_shell_never_runs_what_a_row_says(line: str) -> None:
    row = {"question": HOSTILE}
    env = {"SLUICE_ROW_question": HOSTILE, "PATH": "/usr/bin:/bin"}
    told = subprocess.run(filled([line], row), env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert HOSTILE.split()[-1] in told and told.strip().strip('"') == HOSTILE


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


# ---- `sluice play`: which task it has played, and what it shows of it


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of two sources with three tasks and two, whose rows differ in their form."""
    first = tmp_path / "first.jsonl"
    first.write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(3)))
    second = tmp_path / "second.jsonl"
    second.write_text("".join(json.dumps({"who": "maze", "size": n}) + "\n" for n in (3, 4)))
    train = f"[{{path: {first}}}, {{path: {second}, handler: task, columns: {{environment: who}}}}]"
    return load({"run": {"name": "a", "dir": str(tmp_path / "run")}}, [f"data.train={train}", "sampling.temperature=0.5"])


def playing(config: Config, task: int) -> Config:
    made = evaluate._OneTask(config, View(Console(file=io.StringIO())), LocalNode.of(config))
    made.task = task
    return made.chosen(config)


@pytest.mark.parametrize(("task", "told"), [(0, {"question": "0?", "answer": 0}), (4, {"who": "maze", "size": 4})])
def test_tasks_are_counted_over_all_sources(config: Config, task: int, told: dict[str, Any]) -> None:
    chosen = playing(config, task)
    assert [json.loads(line) for line in Path(chosen.data.eval).read_text().splitlines()] == [told]
    assert chosen.data.train == "" and chosen.evaluation.temperature == 0.5
    (problem,) = load_problems(chosen.data.eval, chosen.data, "data.eval").problems
    assert problem.environment == told.get("who", "")


@pytest.mark.parametrize(("task", "why"), [(5, "--task: 5, but there are only 5 tasks"), (-1, "--task: -1 is below 0")])
def test_a_task_that_is_not_there_is_refused(config: Config, task: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        playing(config, task)


def test_the_conversation_is_shown_with_what_it_earned() -> None:
    played = Generation(
        set="eval",
        problem="a:1",
        sample=0,
        prompt="<|user|>2?",
        reply="2",
        label="2",
        answer="2",
        reward=0.5,
        rules={"gsm8k": 1.0, "format": None},
        correct=True,
        tokens=1,
        finish="stop",
        versions=("0", "0"),
        logprob=None,
    )
    assert evaluate.shown(played) == "<|user|>2?2\n\na:1: reward 0.5 (gsm8k 1), stop"
    branches = structs.replace(
        played, earlier=["<|user|>1?1"], prompt="", reply="<|user|>2?2", outcome="max_turns", logprob=-1.0
    )
    assert evaluate.shown(branches) == "<|user|>1?1\n\n<|user|>2?2\n\na:1: reward 0.5 (gsm8k 1), max_turns"
    silent = structs.replace(played, prompt="\0", reply="", rules={}, reward=None, outcome="left out: it broke")
    assert evaluate.shown(silent) == "(the model gave no reply)\n\na:1: no reward, left out: it broke"


@pytest.mark.parametrize(
    ("arguments", "overrides", "task"),
    [
        (["play", "a.yaml", "--task", "3", "b.c=1", "d=2"], ["b.c=1", "d=2"], 3),
        (["play", "a.yaml", "b.c=1", "--task", "3", "d=2"], ["b.c=1", "d=2"], 3),
        (["play", "--task", "3", "a.yaml"], [], 3),
        (["play", "a.yaml", "d=2"], ["d=2"], 0),
    ],
)
def test_overrides_may_stand_before_and_behind_options(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], overrides: list[str], task: int
) -> None:
    seen = []
    monkeypatch.setattr("launcher.commands.evaluate.run_play", seen.append)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert not ended.value.code
    assert (seen[0].overrides, seen[0].task, seen[0].config) == (overrides, task, Path("a.yaml"))


@pytest.mark.parametrize("rest", [["--task", "1", "word"], ["--unknown", "a=b"], ["--task", "one"]])
def test_what_is_no_override_is_still_a_mistake(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["play", "a.yaml", "b=1", *rest])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


# ---- `sluice check-template`: forty conversations, how each goes on, and where and why one would be rendered anew


COUNTS = "40 conversations: {} go on token for token, {} would be rendered anew, {} are refused"
Checked = Callable[..., tuple[int, str]]


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Gives the exit code, and what is printed on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "240")

    def check(folder: Path, *options: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["check-template", str(folder), *options])
        assert isinstance(end.value.code, int)
        shown = capsys.readouterr()
        return end.value.code, shown.out + shown.err

    return check


def row(shown: str, name: str) -> list[str]:
    (found,) = [line for line in shown.splitlines() if re.match(rf"│ {re.escape(name)} +│", line)]
    return [cell.strip() for cell in found.strip("│").split("│")]


def test_forty_conversations_have_what_agents_do() -> None:
    probes = conversations()
    assert len(probes) == len({probe.name for probe in probes}) == 40
    replies = [message for probe in probes for message in probe.messages if message.role == "assistant"]
    assert {message.role for probe in probes for message in probe.messages} == {"system", "user", "assistant", "tool"}
    assert any(len(message.tool_calls) == 3 for message in replies) and any(message.reasoning for message in replies)
    assert any(not message.content and not message.tool_calls for message in replies)
    for probe in probes:  # every call is answered, and each conversation has a reply to go on from
        made = [call.id for message in probe.messages for call in message.tool_calls]
        assert made == [message.tool_call_id for message in probe.messages if message.role == "tool"]
        assert probe.messages[-1].role == "assistant" and sum(each.role == "assistant" for each in probe.messages) > 1
        assert probe.with_tools or not made


REFUSED = "messages 3, 5: not a prefix: the template renders messages differently if more messages follow"


@pytest.mark.parametrize(
    ("template", "code", "counts", "name", "told"),
    [
        (cases.HERMES, 0, (40, 0, 0), "six calls", ["six calls", "difference x 6", ""]),
        (cases.JSON, 0, (38, 0, 2), "two calls at once", "message 4: messages: "),  # what it refuses is no fork
        (cases.FORGETFUL, 1, (0, 40, 0), "thinking once", REFUSED),
    ],
    ids=["appends", "refuses", "forks"],
)
def test_each_conversation_goes_on_or_is_told_where_and_why_not(
    tmp_path: Path, checked: Checked, template: str, code: int, counts: tuple[int, int, int], name: str, told: str | list[str]
) -> None:
    found, shown = checked(cases.folder_of(tmp_path, template))
    assert found == code
    assert shown.splitlines()[-1] == COUNTS.format(*counts)
    cells = row(shown, name)
    assert cells == told if isinstance(told, list) else cells[2].startswith(told)


def test_a_named_format_writes_the_tools_into_the_messages(tmp_path: Path, checked: Checked) -> None:
    folder = cases.folder_of(tmp_path, cases.PLAIN)
    code, shown = checked(folder, "--tool-format", "smollm2")
    said = shown.splitlines()[-3:]
    assert code == 0 and said[0].startswith("calls of tools: smollm2;") and said[2] == COUNTS.format(40, 0, 0)
    number = sum(bool(message.tool_calls) for probe in conversations() for message in probe.messages)
    assert said[1] == f"{number} of {number} replies with calls are read as they were written"


def test_a_family_goes_on_by_renderers_but_where_it_leaves_out_what_was_reasoned(tmp_path: Path, checked: Checked) -> None:
    pytest.importorskip("renderers", reason="needs renderers (make install-dev, Python 3.11 or newer)")
    code, shown = checked(cases.qwen3(tmp_path))
    assert code == 1
    assert shown.splitlines()[-1] == COUNTS.format(37, 3, 0)
    assert row(shown, "thinking between calls")[1:] == ["renderers x 2", ""]
    assert row(shown, "a question after a call")[1:] == ["renderers x 2, difference x 1", ""]
    assert "not a prefix" in row(shown, "thinking")[2]


@pytest.mark.parametrize("kind", ["missing", "no template"])
def test_a_folder_that_is_no_model_s_is_the_user_s_to_mend(tmp_path: Path, checked: Checked, kind: str) -> None:
    folder = tmp_path / "model"
    if kind == "no template":
        cases.folder_of(folder, "")
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    code, shown = checked(folder)
    assert code == 2 and str(folder) in shown and len(shown.splitlines()) == 1
