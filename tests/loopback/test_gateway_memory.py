"""What a gateway is done with is freed at once: nothing of it waits until somebody looks for garbage."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from runtime import codec
from runtime.gateway.conversation import Completion, Message, PolicyCall, PolicyReply, Refused
from runtime.gateway.episode import GatewayEpisode
from runtime.gateway.episodes import Episodes
from runtime.gateway.http import runner
from runtime.gateway.rendering import TemplateRenderer
from runtime.types import EpisodeTask, GroupPayload, PlayRequest, Sample, SamplingParams
from services.gateway import own
from tests.unit.template_cases import tiny_renderer

KEY, PATIENCE = "the gateway's", 60.0


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return tiny_renderer(tmp_path_factory.mktemp("model"))


def episodes_of(renderer: TemplateRenderer, answer: Any) -> Episodes:
    made = Episodes(
        model="m",
        renderer=renderer,
        answer=answer,
        most=16,
        seconds=PATIENCE,
        name="gateway-0",
        serves=False,
        rewarded=False,
    )
    made.key = KEY
    return made


def requests() -> int:
    """That there are in this process: others than a test's own, too."""
    return sum(isinstance(each, web.Request) for each in gc.get_objects())


def played(episodes: Episodes, n: int) -> asyncio.Future[Any]:
    task, sampling = EpisodeTask(messages=[{"role": "user", "content": "hello"}]), SamplingParams(max_new_tokens=8)
    return asyncio.ensure_future(episodes.play(PlayRequest(group_id=7, task=task, n=n, seed=3, sampling=sampling)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_refused(renderer: TemplateRenderer, uncollected: None, stream: bool) -> None:
    async def refuse(episode: GatewayEpisode, call: PolicyCall, told: Any) -> Completion:
        await asyncio.sleep(0)
        raise Refused(400, "too long")

    async def scenario() -> None:
        episodes, before = episodes_of(renderer, refuse), requests()
        playing = played(episodes, 1)
        begun = await episodes.begin(KEY, PATIENCE)
        served = runner(episodes, 1 << 20)
        await served.setup()
        await web.TCPSite(served, "127.0.0.1", 0).start()
        host, port = served.addresses[0]
        headers = {"Authorization": f"Bearer {begun.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for number in range(5):
                body = {"messages": [{"role": "user", "content": f"{number}?"}], "stream": stream}
                async with session.post(f"http://{host}:{port}/v1/chat/completions", json=body) as answer:
                    assert answer.status == 400
                    await answer.read()
        await served.cleanup()
        await asyncio.sleep(0)
        await episodes.end(episodes.episode(begun.id, begun.key))
        await playing
        assert requests() <= before

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_the_message_that_a_reply_came_in() -> None:
    one = np.ones(2, np.uint8)
    sample = Sample(
        tokens=np.array([5, 6], np.int32),
        loss_mask=one,
        logprobs=np.array([-1, -2], np.float32),
        versions=np.zeros(2, np.int64),
        finish_reason="stop",
    )
    message = codec.encode(GroupPayload.of(1, np.arange(1000, dtype=np.int32), [sample]))
    (found,) = (own(each) for each in codec.decode(GroupPayload, message).samples)
    assert found.tokens.tolist() == [5, 6] and found.logprobs.tolist() == [-1, -2]
    assert found.tokens.base is None and found.logprobs.base is None


def test_an_episode_that_is_over(renderer: TemplateRenderer, uncollected: None) -> None:
    async def answer(episode: GatewayEpisode, call: PolicyCall, told: Any) -> Completion:
        extension = episode.graph.extend(call)
        tokens = np.array([*b"yes", *renderer.stop_ids[:1]], np.int32)
        logprobs, message = np.zeros(4, np.float32), Message("assistant", "yes")
        reply = PolicyReply(message, tokens, logprobs, np.zeros(4, np.int64), "stop")
        episode.graph.add(extension, f"c{episode.calls}", [reply])
        return Completion(id="c", created=0.0, model="m", prompt=extension.prompt, replies=(reply,))

    async def scenario() -> None:
        episodes = episodes_of(renderer, answer)
        playing = played(episodes, 2)
        kept: list[weakref.ref[Any]] = []
        for _ in range(2):
            begun = await episodes.begin(KEY, PATIENCE)
            episode = episodes.episode(begun.id, begun.key)
            said = (Message("user", "1?"),)
            for number in range(3):
                completion = await episodes.call(episode, PolicyCall(messages=said, repeats=f"body:{number}"))
                said = (*said, completion.replies[0].message, Message("user", f"{number}?"))
            kept += [weakref.ref(each) for each in (episode, episode.graph, *(node.given for node in episode.graph.nodes))]
            await episodes.end(episode, "completed")
            del episode
        group = await playing
        assert group.response_tokens and len(kept) == 2 * (2 + 3)
        del playing
        await asyncio.sleep(0)
        assert [each() for each in kept] == [None] * len(kept)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
