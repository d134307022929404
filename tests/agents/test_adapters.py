"""Each adapter with something that nobody here wrote, and a gateway whose model says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from gymnasium_text import GymnasiumText
from mcp_tools import McpServer, innermost, untitled
from openenv_client import OpenEnvClient
from trl_environment import TrlEnvironment
from verifiers_taskset import VerifiersTaskset

from sluice.agents import CommandAgent, DataError, InfrastructureError, ToolAgent
from tests.agents.adapters import play, played
from tests.agents.conftest import PATIENCE, ROOT, Gateway
from tests.agents.servers import mcp_time, openenv_echo
from tests.system.runs import eventually

pytestmark = [pytest.mark.usefixtures("scripted"), pytest.mark.timeout(300)]

EXAMPLES = ROOT / "configs" / "agents"


# ----------------------------------------------------------------------------------------------------------------------
# A command


SWE_TASK = """Write hello into a file.
say I write.
call bash {"command": "echo hello > $SLUICE_TEST_FILE"}
---
say Done.
call bash {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo hello"}"""


def test_mini_swe_agents_own_command_is_judged_by_another(gateway: Gateway, tmp_path: Path) -> None:
    mini = ["mini", "--yolo", "--exit-immediately", "--model", "openai/policy", "--output", str(tmp_path / "told.json")]
    env = {"SLUICE_TEST_FILE": str(tmp_path / "file"), "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    agent = CommandAgent(*mini, "--task", "{task}", check="grep -q {word} $SLUICE_TEST_FILE", env=env)
    assert play(gateway, agent, {"task": SWE_TASK, "word": "hello"}).reward == 1.0
    assert play(gateway, agent, {"task": SWE_TASK, "word": "farewell"}).reward == 0.0


def test_the_example_of_a_shell_script(gateway: Gateway) -> None:
    agent = CommandAgent("sh", str(EXAMPLES / "ask.sh"), "{question}", "{answer}")
    assert play(gateway, agent, {"question": "2+3=", "answer": "5"}).reward == 0.0  # it is told its question again
    assert play(gateway, agent, {"question": "It is #### 5", "answer": "5"}).reward == 1.0


def test_a_command_ends_with_all_that_it_started(gateway: Gateway, tmp_path: Path) -> None:
    kept = tmp_path / "pid"
    agent = CommandAgent(f"sleep 1000 & echo $! > {kept}; echo 0.25")
    assert play(gateway, agent, {}).reward == 0.25
    pid = int(kept.read_text())
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, PATIENCE, "its end")


def test_a_command_that_fails_without_a_reward_is_no_episode(gateway: Gateway) -> None:
    with pytest.raises(InfrastructureError, match="exit code 3"):
        play(gateway, CommandAgent("exit 3"), {})


# ----------------------------------------------------------------------------------------------------------------------
# Tools


TIME_TASK = """What time is it?
call convert_time {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
call convert_time {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Atlantis"}
call sleep {}
---
say 21:00"""


def told(data: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    """1 where the server's clock, its refusal and the answer are all there."""
    converted, refused, unknown = (message["content"] for message in messages if message["role"] == "tool")
    assert json.loads(converted)["target"]["datetime"].endswith("21:00:00+09:00")
    assert "Atlantis" in refused and "there is no tool 'sleep'; there are convert_time" in unknown
    return float(messages[-1]["content"] == "21:00")


def test_titles_of_a_schema_go_and_the_first_of_a_group_of_exceptions_is_told() -> None:
    schema = {
        "title": "Args",
        "properties": {"title": {"title": "Title", "type": "string"}, "many": {"anyOf": [{"title": "A"}]}},
    }
    assert untitled(schema) == {"properties": {"title": {"type": "string"}, "many": {"anyOf": [{}]}}}

    class Group(Exception):
        exceptions = (KeyError("x"),)

    assert repr(innermost(Group())) == "KeyError('x')"


@pytest.mark.parametrize("way", ["stdio", "streamable HTTP"])
def test_the_tools_of_mcp_server_time(gateway: Gateway, way: str, tmp_path: Path) -> None:
    with mcp_time(tmp_path) if way != "stdio" else contextlib.nullcontext() as url:
        command = ["python", "-m", "mcp_server_time"] if url is None else [url]
        agent = ToolAgent([McpServer(*command, only=["convert_time"])], reward=told)
        assert play(gateway, agent, {"prompt": TIME_TASK}).reward == 1.0


def test_episodes_of_a_process_may_share_a_server_and_get_another_when_it_has_died(gateway: Gateway) -> None:
    server = McpServer("python", str(EXAMPLES / "lookup_server.py"), shared=True)
    me = psutil.Process()
    before = set(me.children())
    task = {"prompt": 'x\ncall lookup {"key": "rc8"}\n---\nsay 814'}

    def right(data: dict[str, Any], messages: list[dict[str, Any]]) -> float:
        return float(messages[-2]["content"] == "814")

    async def servers(episodes: int) -> set[psutil.Process]:
        """What runs behind them."""
        agent = ToolAgent([server], reward=right)
        found = await asyncio.gather(*(played(gateway, agent, task) for _ in range(episodes)))
        assert [each.reward for each in found] == [1.0] * episodes
        return set(me.children()) - before

    async def play_all() -> None:
        (first,) = await servers(4)
        assert await servers(1) == {first}
        first.kill()
        (second,) = await servers(2)
        assert second != first

    asyncio.run(play_all())
    assert set(me.children()) <= before


def test_a_server_that_is_not_there_is_infrastructure(gateway: Gateway) -> None:
    agent = ToolAgent([McpServer("python", "-c", "")], reward=told)
    with pytest.raises(InfrastructureError, match="the MCP server did not begin"):
        play(gateway, agent, {"prompt": "x"})


def test_turns_run_out(gateway: Gateway) -> None:
    def count(data: dict[str, Any], messages: list[dict[str, Any]]) -> float:
        return len(messages)

    def now(zone: str = "UTC") -> str:
        return zone

    found = play(gateway, ToolAgent([now], reward=count, turns=3), {"prompt": "x\ncall now {}"})
    assert found == (1 + 3 * 2, "max_turns", [])


# ----------------------------------------------------------------------------------------------------------------------
# Environments


class Guess:
    """As TRL's documentation has them: it knows nothing of Sluice."""

    made: ClassVar[list[Guess]] = []

    def reset(self, secret: str, **row: Any) -> str:
        self.secret, self.tried = secret, list[str]()
        Guess.made.append(self)
        return '\ncall guess {"word": "pear"}\n---\ncall guess {"word": "plum"}\n---\nsay done'

    def guess(self, word: str) -> str:
        """Try a word.

        Args:
            word: What it may be.
        """
        self.tried.append(word)
        return "right" if word == self.secret else "wrong"

    def get_reward(self) -> float:
        return 1.0 / len(self.tried) if self.secret in self.tried else 0.0


def test_a_class_of_trls(gateway: Gateway) -> None:
    agent = TrlEnvironment({"words": Guess})
    task = {"prompt": "Which fruit?", "secret": "plum", "environment": "words"}
    assert play(gateway, agent, task).reward == 0.5
    assert play(gateway, agent, {**task, "secret": "fig"}).reward == 0.0
    with pytest.raises(DataError, match="environment: 'sums' is none of words"):
        play(gateway, agent, {**task, "environment": "sums"})
    assert Guess.made[-2].tried == ["pear", "plum"] and Guess.made[-2] is not Guess.made[-1]


def test_trls_reward_functions(gateway: Gateway) -> None:
    def chatty(prompts: Any, completions: Any, environments: Any, secret: list[str], **columns: Any) -> list[float]:
        assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant", "tool", "assistant"]
        assert secret == ["plum"] and environments[0].tried == ["pear", "plum"]
        return [0.25]

    agent = TrlEnvironment(Guess, reward_funcs=[chatty, lambda **_: [None]])
    assert play(gateway, agent, {"prompt": "Which fruit?", "secret": "plum"}).reward == 0.75


class Walk(GymnasiumText):
    """On the ice, by a player who says these moves, one after the other."""

    def __init__(self, moves: str, **given: Any):
        super().__init__("FrozenLake-v1", map_name="4x4", is_slippery=False, render_mode="ansi", **given)
        self._left = iter(moves)

    def text(self, observation: Any, environment: Any) -> str:
        return f"{super().text(observation, environment)}\nsay I go {next(self._left, '0')}"

    def action(self, reply: str) -> int:
        return int(reply[-1])


def test_gymnasiums_frozen_lake(gateway: Gateway) -> None:
    assert play(gateway, Walk("112212"), {"seed": 1}) == (1.0, "", [])  # 1: down, 2: right
    assert play(gateway, Walk("21"), {"seed": 1}) == (0.0, "", [])  # a hole
    assert play(gateway, Walk("000", turns=3), {"seed": 1}) == (0.0, "max_turns", [])
    assert play(gateway, Walk("1x"), {"seed": 1}) == (0.0, "parse_error", [])


def test_each_turn_of_gymnasiums_may_be_rewarded(gateway: Gateway) -> None:
    reward, stop_reason, news = play(gateway, Walk("112212", turn_rewards=True), {"seed": 1})
    assert (reward, stop_reason) == (None, "")
    assert news == [{"reward": float(turn == 5), "turn": turn} for turn in range(6)]


def test_gymnasiums_blackjack_is_dealt_by_the_rows_seed(gateway: Gateway) -> None:
    seen: list[str] = []

    class Cautious(GymnasiumText):
        def text(self, observation: Any, environment: Any) -> str:
            seen.append(str(observation))
            return f"{super().text(observation, environment)}\nsay 0"

    agent = Cautious("Blackjack-v1")
    rewards = [play(gateway, agent, {"seed": seed}).reward for seed in (1, 1, 2)]
    assert rewards[0] == rewards[1] and seen[0] == seen[2] != seen[4]
    assert set(rewards) <= {-1.0, 0.0, 1.0, 1.5}


class Echo(OpenEnvClient):
    def action(self, reply: str) -> Any:
        return {"message": reply}

    def text(self, observation: Any) -> str:
        return f"{super().text(observation)}\nsay hello"


class Json(OpenEnvClient):
    said = '{"message": "hi"}'

    def text(self, observation: Any) -> str:
        return f"say {self.said}"


def test_openenvs_own_environment(gateway: Gateway, tmp_path: Path) -> None:
    with openenv_echo(tmp_path) as url:
        assert play(gateway, Echo(url, turns=3), {"seed": 3}) == (pytest.approx(1.5), "max_turns", [])
        agent = Json(url, turns=1, turn_rewards=True)
        assert play(gateway, agent, {}) == (None, "max_turns", [{"reward": pytest.approx(0.2), "turn": 0}])
        agent.said = "hi"
        assert play(gateway, agent, {}).stop_reason == "parse_error"
    with pytest.raises(InfrastructureError, match="OpenEnv's server"):
        play(gateway, agent, {})


@pytest.mark.usefixtures("verifiers_home")
def test_a_taskset_of_verifiers(gateway: Gateway) -> None:
    agent = VerifiersTaskset("sums_taskset", taskset={"smallest": 1, "largest": 3})
    found = play(gateway, agent, {"task": 5})  # 2+3=, which comes back as the answer
    assert found == (0.0, "", [{"log": {"characters": 4.0}}])
    for number in (9, -1, "1"):
        with pytest.raises(DataError, match="task: "):
            play(gateway, agent, {"task": number})
    assert not [name for name in os.environ if name.startswith("SLUICE_KEY_")]


@pytest.mark.usefixtures("verifiers_home")
def test_what_goes_wrong_within_verifiers_is_infrastructure(gateway: Gateway, tmp_path: Path) -> None:
    with openenv_echo(tmp_path) as url:
        agent = VerifiersTaskset("openenv", taskset={"base_url": url}, player={"max_turns": 2})
        with pytest.raises(InfrastructureError, match="VALIDATION_ERROR"):  # the scripted model repeats what is no action
            play(gateway, agent, {"task": 0})
