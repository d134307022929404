"""Each adapter against `sluice serve`, whose small random model says whatever it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gymnasium_text import GymnasiumText
from verifiers_taskset import VerifiersTaskset

from tests.agents.adapters import play
from tests.agents.conftest import PYTHON, Gateway
from tests.system.runs import START, check_gone, started

pytestmark = pytest.mark.timeout(400)

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
def test_a_conversation_that_is_too_long_is_none_of_verifiers_faults(served: Gateway) -> None:
    size = 10**CONTEXT  # a digit is a token
    found = play(served, VerifiersTaskset("sums_taskset", taskset={"smallest": size, "largest": size}), {"task": 0})
    assert (found.reward, found.stop_reason) == (0.0, "context_overflow")
