"""One call of the policy: what rollouts are asked, in pieces where the client reads along, and what the graph keeps of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.data.tokenizer import Tokenizer
from runtime.errors import DeadlineExceeded, InvalidMessage, Unreachable
from runtime.gateway.calls import PIECES, PolicyCalls
from runtime.gateway.conversation import Completion, Message, PolicyCall, Refused, Tool
from runtime.gateway.episodes import EpisodeRun, GatewayEpisode
from runtime.gateway.graph import payload_of
from runtime.gateway.rendering import TemplateRenderer
from runtime.types import EpisodeTask, GroupRequest, PolicyVersion, RoutedExperts, RunEpisodesRequest, Sample, SamplingParams
from tests.coroutines import handed
from tests.unit.template_cases import HERMES, folder_of

PATIENCE = 60.0
CONTEXT = 512
HELLO = (Message("user", "hello"),)
TOOL = Tool("add", "Adds.", {"type": "object"})
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
RUN = SamplingParams(max_new_tokens=400, temperature=0.7)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(Tokenizer(str(folder_of(tmp_path_factory.mktemp("model"), HERMES))))


class ScriptedPort:
    """Rollouts that go on with `script` behind the prompt of the first request since it was set. No two tokens have the same
    log-probability, and each request is answered by another version."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []
        self.kept: list[str] = []
        self.least: list[PolicyVersion] = []
        self.fault: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.cancelled = 0
        self.say([])

    def say(self, script: Sequence[int]) -> None:
        self._script, self._begins = list(script), -1

    async def generate(self, request: GroupRequest, kept: str, least: PolicyVersion) -> tuple[list[Sample], str]:
        self.requests.append(request)
        self.kept.append(kept)
        self.least.append(least)
        self.asked.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fault is not None:
            raise self.fault
        if self._begins < 0:
            self._begins = len(request.prompt)
        return [self._sample(request, request.first + index) for index in range(request.n)], "rollout-1"

    def _sample(self, request: GroupRequest, number: int) -> Sample:
        done = len(request.prompt) - self._begins
        tokens = self._script[done : done + request.sampling.max_new_tokens]
        ends = [at for at, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        size = len(tokens)
        return Sample(
            tokens=np.array(tokens, np.int32),
            loss_mask=np.ones(size, np.uint8),
            logprobs=-(np.arange(done, done + size) + number * 1000 + 1).astype(np.float32),
            versions=np.full(size, PolicyVersion(0, len(self.requests)).pack(), np.int64),
            finish_reason="stop" if ends else "length",
            experts=None if request.sampling.experts_from < 0 else self._experts(request, size),
        )

    @staticmethod
    def _experts(request: GroupRequest, size: int) -> RoutedExperts:
        """Of one layer, one expert a token: which token of the conversation it is."""
        begin, prompt = request.sampling.experts_from, len(request.prompt)
        return RoutedExperts.of(np.arange(begin, prompt + size - 1, dtype=np.uint16)[:, None, None])


class Desk:
    def __init__(self, renderer: TemplateRenderer, run: SamplingParams | None):
        self.port, self.renderer = ScriptedPort(), renderer
        self.calls = PolicyCalls(model="m", renderer=renderer, rollouts=self.port.generate, context=CONTEXT, run=run)
        task = EpisodeTask(messages=[{"role": "user", "content": "hello"}])
        asked = RunEpisodesRequest(
            group_id=1, task=task, n=1, seed=5, sampling=RUN, version=PolicyVersion(0, 4), purpose="eval"
        )
        group = None if run is None else EpisodeRun(asked, asyncio.get_running_loop().create_future())
        self.episode = GatewayEpisode(renderer, group)

    def say(self, text: str, ended: bool = True) -> list[int]:
        """What the policy will."""
        tokens = [*self.renderer.encode(text), *self.renderer.stop_ids[:1] * ended]
        self.port.say(tokens)
        return tokens

    async def ask(self, *messages: Message, told: Any = None, **call: Any) -> Completion:
        return await self.calls.answer(self.episode, PolicyCall(messages=messages or HELLO, **call), told)

    async def refused(self, *messages: Message, **call: Any) -> Refused:
        with pytest.raises(Refused) as refused:
            await self.ask(*messages, **call)
        return refused.value


def run(renderer: TemplateRenderer, scenario: Callable[[Desk], Awaitable[None]], sampling: SamplingParams | None = RUN) -> None:
    async def whole() -> None:
        desk = Desk(renderer, sampling)
        try:
            await scenario(desk)
        finally:
            desk.calls.close()

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


@handed(run, needs=("renderer",))
async def test_a_reply_is_asked_for_once_and_kept_as_it_was_sampled(desk: Desk, renderer: TemplateRenderer) -> None:
    said = desk.say("hi there")
    completion = await desk.ask()
    (reply,) = completion.replies
    (request,) = desk.port.requests
    assert (reply.message.content, reply.end, reply.tokens.tolist()) == ("hi there", "stop", said)
    assert request.prompt.tolist() == completion.prompt.tolist() == renderer.render(HELLO, ())
    assert (request.n, request.keep, request.purpose) == (1, True, "eval")
    (node,) = desk.episode.graph.nodes
    assert node.tokens().tolist() == [*completion.prompt.tolist(), *said]
    assert node.reply.logprobs.tolist() == reply.logprobs.tolist() == [-1.0 - at for at in range(len(said))]
    # the next call goes where the first went, and needs no older version than counts
    desk.say("bye")
    await desk.ask(*HELLO, reply.message, Message("user", "and?"))
    assert (desk.port.kept, desk.port.least) == (["", "rollout-1"], [PolicyVersion(0, 4)] * 2)
    assert desk.port.requests[1].seed != request.seed
    assert node.followed and not desk.episode.graph.forks


@handed(run, needs=("renderer",))
async def test_a_reply_that_is_read_along_comes_in_pieces_that_go_on(desk: Desk) -> None:
    text = "".join(f"{number}, " for number in range(60)) + "end"
    said, told = desk.say(text), list[str]()
    completion = await desk.ask(told=lambda id, index, message: told.append(message.content))
    (reply,), requests = completion.replies, desk.port.requests
    assert reply.tokens.tolist() == said and reply.message.content == told[-1] == text
    assert len(told) == len(requests) > len(PIECES) - 1
    assert all(after.startswith(before) for before, after in itertools.pairwise(told))
    whole = [*completion.prompt.tolist(), *said]
    for size, request in zip(np.cumsum([0, *PIECES]), requests, strict=False):
        assert request.prompt.tolist() == whole[: len(completion.prompt) + size]
    assert len({request.seed for request in requests}) == len(requests)
    (node,) = desk.episode.graph.nodes
    assert node.reply.logprobs.tolist() == [-1.0 - at for at in range(len(said))]
    versions = [PolicyVersion.unpack(int(version)).step for version in node.reply.versions]
    assert versions == sorted(versions) and set(versions) == set(range(1, len(requests) + 1))


@pytest.mark.parametrize("place", [3, 14, 40])  # within a piece, and over the border of two
@handed(run, needs=("renderer",))
async def test_a_stop_text_ends_a_reply_with_the_token_that_completes_it(desk: Desk, place: int) -> None:
    said, told = desk.say("x" * place + "STOP and more"), list[str]()
    completion = await desk.ask(stop=("never", "STOP"), told=lambda id, index, message: told.append(message.content))
    (reply,) = completion.replies
    assert (reply.message.content, reply.stop, reply.end) == ("x" * place, "STOP", "stop")
    assert reply.tokens.tolist() == said[: place + 4]
    assert all(("x" * place).startswith(text) for text in told)
    assert desk.episode.graph.nodes[0].reply.tokens.tolist() == reply.tokens.tolist()


@pytest.mark.parametrize("told", [None, lambda id, index, text: None], ids=["at once", "in pieces"])
@handed(run, needs=("renderer",))
async def test_an_episode_has_the_experts_of_all_that_was_fed(desk: Desk, told: Any) -> None:
    """Each token once, whether it was given, sampled in pieces, or the last of a reply, which the next request feeds. What was
    cut off behind a stop text is not there. A reply that nobody went on from, and one of another conversation, have theirs."""
    assert desk.episode.request is not None
    desk.episode.request = replace(desk.episode.request, sampling=replace(RUN, experts_from=0))
    history = HELLO
    for turn in range(3):
        desk.say(f"{turn} " * 30 + "STOP and more")
        completion = await desk.ask(*history, stop=("STOP",), told=told)
        history = (*history, completion.replies[0].message, Message("user", f"and {turn}?"))
        if turn == 1:
            desk.say("no")
            await desk.ask(*history, told=told)
    desk.say("another")
    await desk.ask(Message("user", "else"), told=told)
    begins = [each.sampling.experts_from for each in desk.port.requests]
    assert begins[0] == 0 and max(begins) > 60
    branches = desk.episode.graph.branches()
    assert len(branches) == 3
    for branch in branches:
        assert branch.experts is not None
        assert branch.experts.data.tolist() == list(range(len(branch.tokens) - 1))
    payload, _ = payload_of(1, [desk.episode.graph], np.arange(3, dtype=np.int32))
    assert payload.experts is not None
    for row, own in zip(payload.samples, payload.experts.by_row(payload.lengths.tolist()), strict=True):
        assert own.data.tolist() == list(range(len(payload.prompt) + len(row.tokens) - 1))


@handed(run, needs=("renderer",))
async def test_where_calls_come_one_at_a_time_the_first_ends_the_reply(desk: Desk, renderer: TemplateRenderer) -> None:
    said = desk.say(CALL + CALL)
    both = await desk.ask(tools=(TOOL,))
    assert [len(reply.message.tool_calls) for reply in both.replies] == [2]
    desk.port.say(said)
    one = await desk.ask(tools=(TOOL,), parallel_tool_calls=False)
    (reply,) = one.replies
    assert (len(reply.message.tool_calls), reply.end, reply.stop) == (1, "tool_calls", CALL[-len("</tool_call>") :])
    assert reply.tokens.tolist() == renderer.encode(CALL)


@handed(run, needs=("renderer",))
async def test_a_call_is_streamed_once_it_is_whole_and_a_broken_one_is_counted(desk: Desk) -> None:
    desk.say(f"Let me.{CALL}{CALL}<tool_call>{{")
    told = list[Message]()
    completion = await desk.ask(tools=(TOOL,), told=lambda id, index, message: told.append(message))
    (reply,) = completion.replies
    counts = [len(message.tool_calls) for message in told]
    assert counts == sorted(counts) and {0, 1, 2} == set(counts)
    assert all(reply.message.tool_calls[: len(message.tool_calls)] == message.tool_calls for message in told)
    assert (reply.message.content, reply.malformed) == ("Let me.\n<tool_call>{", True)
    assert desk.calls.counts["malformed_calls"] == 1
    desk.say("<tool_call>{", ended=False)
    assert not (await desk.ask(tools=(TOOL,), max_tokens=12)).replies[0].malformed  # cut off
    assert desk.calls.counts["malformed_calls"] == 1


@handed(run, needs=("renderer",))
async def test_several_replies_draw_on_streams_of_their_own(desk: Desk) -> None:
    for told in (None, lambda id, index, text: None):
        desk.port.requests.clear()
        desk.say("hi")
        completion = await desk.ask(n=3, told=told)
        streams = [(each.first, each.n) for each in desk.port.requests]
        assert sorted(streams) == ([(0, 3)] if told is None else [(0, 1), (1, 1), (2, 1)])
        assert [reply.logprobs[0] for reply in completion.replies] == [-1.0, -1001.0, -2001.0]


@handed(run, needs=("renderer",))
async def test_a_conversation_that_is_too_long_is_told_both_lengths(desk: Desk, renderer: TemplateRenderer) -> None:
    room = CONTEXT - len(renderer.render((Message("user", ""),), ()))
    refused = await desk.refused(Message("user", "x" * room))
    assert (refused.status, refused.param, refused.code) == (400, "messages", "context_length_exceeded")
    assert f"{CONTEXT} tokens" in str(refused) and f"messages have {CONTEXT}" in str(refused)
    assert not desk.port.requests
    desk.say("many words", ended=False)
    completion = await desk.ask(Message("user", "x" * (room - 3)), max_tokens=100)
    assert (completion.replies[0].message.content, completion.replies[0].end) == ("man", "length")


@handed(run, needs=("renderer",))
async def test_a_run_samples_as_it_does_and_counts_who_asks_otherwise(desk: Desk, renderer: TemplateRenderer) -> None:
    for wish in ({}, {"temperature": 0.7}, {"temperature": 0.2, "top_p": 0.5, "top_k": 3, "min_p": 0.1}):
        desk.say("hi")
        await desk.ask(max_tokens=20, stop_token_ids=(9,), **wish)
    expected = replace(RUN, max_new_tokens=20, stop_token_ids=(*renderer.stop_ids, 9))
    assert [each.sampling for each in desk.port.requests] == [expected] * 3
    assert desk.calls.counts["overridden"] == 1


@handed(run, needs=("renderer",), sampling=None)
async def test_where_there_is_no_run_a_call_samples_as_it_says(desk: Desk, renderer: TemplateRenderer) -> None:
    wish: dict[str, Any] = {"temperature": 0.2, "top_p": 0.5, "top_k": 3, "min_p": 0.1}
    for seed in (8, 8, None):
        desk.episode = GatewayEpisode(renderer)
        desk.say("hi")
        await desk.ask(max_tokens=20, seed=seed, **wish)
    first, again, other = desk.port.requests
    assert first.sampling == SamplingParams(max_new_tokens=20, stop_token_ids=renderer.stop_ids, **wish)
    assert first.seed == again.seed != other.seed
    assert desk.calls.counts["overridden"] == 0


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (InvalidMessage("group -5: token ids outside of 0..260"), 400, "token ids outside of 0..260"),
        (DeadlineExceeded("rollout-0", "Generate", "did not answer", 5.0), 408, "Generate"),
        (Unreachable("rollout", "Generate", "none is there"), 503, "no rollout serves: none is there"),
    ],
)
@handed(run, needs=("renderer",))
async def test_what_becomes_of_the_rollouts_faults(desk: Desk, fault: Exception, status: int, words: str) -> None:
    desk.port.fault = fault
    for told in (None, lambda id, index, text: None):
        refused = await desk.refused(told=told)
        assert refused.status == status and words in str(refused) and "group" not in str(refused)
        assert (refused.retry_after is not None) == (status == 503)
    assert not desk.episode.graph.nodes


@pytest.mark.parametrize("streamed", [False, True])
@handed(run, needs=("renderer",))
async def test_a_call_that_is_withdrawn_leaves_nothing_in_the_graph(desk: Desk, streamed: bool) -> None:
    desk.port.gate.clear()
    asked = asyncio.ensure_future(desk.ask(n=2, told=(lambda id, index, text: None) if streamed else None))
    while len(desk.port.requests) < (2 if streamed else 1):
        desk.port.asked.clear()
        await desk.port.asked.wait()
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled() and desk.port.cancelled == len(desk.port.requests)
    assert not desk.episode.graph.nodes
    desk.port.gate.set()
    desk.say("hi")
    await desk.ask()
    assert len(desk.episode.graph.nodes) == 1 and not desk.episode.graph.forks
