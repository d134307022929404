"""Where a gateway's sessions send the calls of a conversation: two rollouts with the embedded engine, over real sockets."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from runtime import config
from runtime.commands import PeerAddress
from runtime.types import GATEWAY_GROUPS, GroupRequest, PolicyVersion, SamplingParams
from services import gateway
from services.gateway import RolloutSessions
from services.rollout import RolloutService
from services.rpc.server import Server
from tests.coroutines import driven_by, within
from tests.unit.actor_desk import running
from tests.unit.rollout_cases import Make, engines, update
from tests.unit.test_kv_for_waiting import TwoModels

pytestmark = pytest.mark.numeric

CONFIG = config.Config(run=config.Run(name="test"), services=config.Services(rollout=config.Rollout(replicas=2)))
SLOTS, REPLY = 2, 8
IDS = itertools.count(GATEWAY_GROUPS - 100)


MODELS = TwoModels("qwen2")


@pytest.fixture
def make_engine() -> Iterator[Make]:
    with engines(MODELS.path, max_model_len=256) as build:
        yield build


@asynccontextmanager
async def serving(service: RolloutService) -> AsyncIterator[PeerAddress]:
    server = Server({"Rollout": {"Generate": service._actor.send}})
    address = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with running(service._actor):
            yield PeerAddress(service.name, 0, address, "", SLOTS)
    finally:
        await server.stop(0.0)


def ask(prompt: np.ndarray, n: int = 1, limit: int = REPLY, **fields: Any) -> GroupRequest:
    sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=())
    known = {"group_id": next(IDS), "n": n, "seed": 1, "sampling": sampling, "prompt": prompt.astype(np.int32)}
    return GroupRequest(**known, **fields)


@driven_by(within(60.0))
async def test_a_conversation_stays_until_its_rollout_has_a_queue(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1.0)
    monkeypatch.setattr(gateway, "now", lambda: next(clock))  # a reply takes some seconds, far more than a prefill
    services = [RolloutService(CONFIG, f"rollout-{number}", number) for number in range(2)]
    for each in services:
        each.use(make_engine(SLOTS))
    sessions, at = RolloutSessions(CONFIG, None), ""
    text = np.arange(150) % 50

    async def turn(**fields: Any) -> str:
        nonlocal text, at
        (sample,), at = await sessions.generate(ask(text, keep=True, **fields), at, PolicyVersion())
        text = np.concatenate([text, sample.tokens, [3, 4, 5]])
        return at

    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(each)) for each in services]
        await sessions.use(addresses)
        stack.push_async_callback(sessions.close)
        first = await turn()
        assert [await turn() for _ in range(3)] == [first] * 3
        own, other = sorted(services, key=lambda each: each.name != first)
        assert own._engine.stats().kv_hits == 3
        # Another caller's samples wait there. A probe goes before them, and its reply reports them.
        queue = own._actor.send(ask(np.arange(20), n=40, limit=60))
        assert await turn(purpose="probe") == own.name
        assert not queue.done()
        assert await turn() == other.name
        assert other._engine.stats().prefill_tokens == len(text) - REPLY - 3, "it is computed anew"
        assert await turn() == other.name
        assert other._engine.stats().kv_hits == 1
        await queue
        # New weights: no cache has a text any more, except what is returned from now on.
        for each in services:
            await update(each._engine, MODELS.tensors, PolicyVersion(0, 1))
        await turn()
        held = {to.name: len(cost.texts) for to, cost in sessions._costs.items()}
        assert held.pop(at) == (len(text) - 3) // 64
        assert set(held.values()) == {0}
