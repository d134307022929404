"""The tutorial's agent earns what its page says, with a model that asks the tool and one that does not; its files fit together.

That its configuration is valid and its commands are there is held with those of all pages, by test_docs_blocks.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.config.yaml_text import read_value
from tests.unit.docs_blocks import ROOT, read

FILES = {block.file: block.text for block in read(ROOT / "docs/tutorial.md") if block.file}


def call(arguments: str) -> Any:
    function = SimpleNamespace(name="lookup", arguments=arguments)
    return SimpleNamespace(content="", tool_calls=[SimpleNamespace(id="call_0", function=function)])


def say(text: str) -> Any:
    return SimpleNamespace(content=text, tool_calls=None)


class Client:
    """In the place of OpenAI's: replies as `script` says, of which an entry may be a function of the last message."""

    script: list[Any]

    def __init__(self, **_: Any):
        replies = iter(self.script)

        async def create(*, messages: list[Any], **_: Any) -> Any:
            reply = next(replies)
            return SimpleNamespace(choices=[SimpleNamespace(message=reply(messages[-1]) if callable(reply) else reply)])

        self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What price_agent.py defines, in a folder with the tasks that make_tasks.py writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(AsyncOpenAI=Client))
    defined: dict[str, Any] = {}
    for name in ("make_tasks.py", "price_agent.py"):
        defined = {"__file__": str(tmp_path / name)}
        exec(compile(FILES[name], name, "exec"), defined)
    return defined


def repeat(message: Any) -> Any:
    return say(message["content"])


ASK = call('{"key": "ma5"}')


@pytest.mark.parametrize(
    ("script", "reward", "calls"),
    [
        *(([ASK, repeat], 1.0, 1), ([say("5")], 0.0, 0), ([ASK, ASK, repeat], 0.9, 2)),
        ([call('{"key": "none"}'), repeat], 0.0, 1),  # it is told "unknown"
        ([call("ma5"), ASK, repeat], 0.9, 2),  # the first call is no JSON
        ([ASK] * 4, -0.3, 4),  # it never answers
    ],
)
def test_an_episode_earns_what_the_page_says(agent: dict[str, Any], script: list[Any], reward: float, calls: int) -> None:
    played = play(agent, script)
    assert played.reward == pytest.approx(reward) and played.logged == {"calls": calls}
    assert played.stop_reason == ("max_turns" if calls == 4 else "")


def play(agent: dict[str, Any], script: list[Any]) -> Any:
    Client.script = script
    episode = SimpleNamespace(stop_reason="", log=lambda **figures: setattr(episode, "logged", figures))
    given = {"base_url": "", "api_key": "", "http_client": None, "episode": episode, "root": ""}
    episode.reward = asyncio.run(agent["run"]({"code": "ma5"}, **given))
    return episode


def test_the_files_name_each_other(agent: dict[str, Any]) -> None:
    config = read_value(FILES["price_agent.yaml"])
    file, _, name = config["services"]["environment"]["prices"]["run"].partition(":")
    assert file == "price_agent.py" and name in agent
    texts = [Path(config["data"][part]).read_text() for part in ("train", "eval")]
    trained, evaluated = ([json.loads(line)["code"] for line in text.splitlines()] for text in texts)
    assert len(set(trained) | set(evaluated)) == len(agent["PRICES"]) == len(trained) + len(evaluated)
    assert "from price_agent import" in FILES["ask_price.py"]
