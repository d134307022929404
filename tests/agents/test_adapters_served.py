"""Each adapter against `sluice serve`, whose small random model says whatever it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium_text import GymnasiumText
from mcp_tools import McpServer
from openenv_client import OpenEnvClient
from verifiers_taskset import VerifiersTaskset

from sluice.agents import ToolAgent
from tests.agents.adapters import play
from tests.agents.conftest import PYTHON, ROOT, Gateway
from tests.agents.servers import openenv_echo
from tests.system.runs import START, check_gone, started

pytestmark = pytest.mark.timeout(400)

EXAMPLES = ROOT / "configs" / "agents"
CONTEXT = 2048


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("served") / "run"
    small = ["services.gateway.port=0", f"gateway.context={CONTEXT}", "sampling.max_new_tokens=16"]
    with started(Path("tiny:qwen2"), *small, folder=folder, command="serve", python=PYTHON) as live:
        live.says("SLUICE_GATEWAY_KEY", START)
        told = dict(line.removeprefix("export ").split("=") for line in live.output.splitlines() if line.startswith("export "))
        yield Gateway(told["SLUICE_GATEWAY_URL"], told["SLUICE_GATEWAY_KEY"], scripted=False)
        live.interrupt()
        assert live.wait(START) == 0, live.output + live.errors
        check_gone(live.folder)


def characters(data: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    return float(len(messages[-1]["content"] or ""))


def test_tools_of_a_server(served: Gateway) -> None:
    agent = ToolAgent([McpServer("python", str(EXAMPLES / "lookup_server.py"))], reward=characters, turns=2)
    found = play(served, agent, {"prompt": "What is ab7?"})
    assert found.reward >= 0 and found.stop_reason in ("", "max_turns", "max_tokens")


def test_gymnasium(served: Gateway) -> None:
    """Until the conversation is too long: the ice is walked on from one side to the other, and never left."""

    class Still(GymnasiumText):
        def action(self, reply: str) -> int:
            return 0

    still = Still("FrozenLake-v1", turns=1000, turn_rewards=True, desc=["SF", "FG"], is_slippery=False, render_mode="ansi")
    found = play(served, still, {"seed": 1})
    assert (found.reward, found.stop_reason) == (None, "context_overflow")
    # How many replies fill the conversation is chance: a random model ends one after some hundreds of tokens, or thousands.
    assert found.news == [{"reward": 0.0, "turn": turn} for turn in range(len(found.news))] and found.news


@pytest.mark.usefixtures("verifiers_home")
def test_openenv_and_verifiers_own_taskset_of_it(served: Gateway, tmp_path: Path) -> None:
    with openenv_echo(tmp_path) as url:
        lengths: list[int] = []

        class Echo(OpenEnvClient):
            def action(self, reply: str) -> Any:
                return {"message": reply}

            def text(self, observation: Any) -> str:
                lengths.append(observation["message_length"])
                return f"{lengths[-1]} characters."

        found = play(served, Echo(url, turns=3), {})
        assert found.reward == pytest.approx(sum(min(length * 0.1, 1.0) for length in lengths))
        assert (found.stop_reason, len(lengths), lengths[0]) == ("max_turns", 1 + 3, 0)
        player = {"max_turns": 1, "sampling": {"temperature": 0.0}}
        found = play(served, VerifiersTaskset("openenv", taskset={"base_url": url}, player=player), {"task": 0})
        assert 0 < found.reward <= 1.0 and found.stop_reason == "max_turns"


@pytest.mark.usefixtures("verifiers_home")
def test_a_conversation_that_is_too_long_is_none_of_verifiers_faults(served: Gateway) -> None:
    size = 10**CONTEXT  # a digit is a token
    found = play(served, VerifiersTaskset("sums_taskset", taskset={"smallest": size, "largest": size}), {"task": 0})
    assert (found.reward, found.stop_reason) == (0.0, "context_overflow")
