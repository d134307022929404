"""The episodes of a gateway: tasks and who plays them, keys, repeats, deadlines, and the group that comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from runtime import codec
from runtime.errors import DeadlineExceeded
from runtime.gateway.conversation import Completion, Message, PolicyCall, PolicyReply, Refused, Tool, ToolCall
from runtime.gateway.episode import GatewayEpisode, Playing
from runtime.gateway.episodes import Episodes
from runtime.gateway.rendering import TemplateRenderer
from runtime.process import spans
from runtime.process.spans import TracedSpan
from runtime.types import EpisodeTask, GeneratedGroup, GroupPayload, PlayRequest, PolicyVersion, SamplingParams
from tests.unit.template_cases import tiny_renderer

PATIENCE = 60.0
KEY = "the gateway's"
HELLO = (Message("user", "hello"),)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return tiny_renderer(tmp_path_factory.mktemp("model"))


class ScriptedPolicy:
    """Answers each call with as many tokens as calls came before, once `gate` is open."""

    def __init__(self, renderer: TemplateRenderer):
        self._renderer = renderer
        self.calls = 0
        self.began: asyncio.Queue[int] = asyncio.Queue()
        self.gate = asyncio.Event()
        self.gate.set()
        self.tools: tuple[str, ...] = ()  # that each reply calls

    async def __call__(self, episode: GatewayEpisode, call: PolicyCall, told: Any) -> Completion:
        self.calls += 1
        number = self.calls
        self.began.put_nowait(number)
        extension = episode.graph.extend(call)
        await self.gate.wait()
        tokens = np.array([*b"x" * number, *self._renderer.stop_ids[:1]], np.int32)
        versions = np.full(len(tokens), PolicyVersion(0, number).pack(), np.int64)
        calls = tuple(ToolCall(f"tool-{at}", name, "{}") for at, name in enumerate(self.tools))
        message = Message("assistant", "x" * number, calls)
        logprobs = np.full(len(tokens), -0.5, np.float32)
        reply = PolicyReply(message, tokens, logprobs, versions, "stop")
        episode.graph.add(extension, f"call-{number}", [reply])
        return Completion(id=f"call-{number}", created=0.0, model="m", prompt=extension.prompt, replies=(reply,))


def request(group_id: int = 7, n: int = 2, environment: str = "") -> PlayRequest:
    task = EpisodeTask(messages=[{"role": "user", "content": "hello"}], label="5", environment=environment)
    sampling = SamplingParams(max_new_tokens=8)
    return PlayRequest(group_id=group_id, task=task, n=n, seed=3, sampling=sampling, version=PolicyVersion(0, 4))


def run(renderer: TemplateRenderer, scenario: Callable[[Episodes, ScriptedPolicy], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        policy = ScriptedPolicy(renderer)
        defaults = {"most": 16, "seconds": PATIENCE, "serves": False, "rewarded": False}
        episodes = Episodes(model="m", renderer=renderer, answer=policy, name="gateway-0", **(defaults | settings))
        episodes.key = KEY
        await scenario(episodes, policy)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


async def opened(episodes: Episodes) -> GatewayEpisode:
    begun = await episodes.begin(KEY)
    return episodes.episode(begun.id, begun.key)


def call(*messages: Message, repeats: str = "", tools: tuple[str, ...] = ()) -> PolicyCall:
    return PolicyCall(messages=messages or HELLO, repeats=repeats, tools=tuple(map(Tool, tools)))


async def refusal(work: Awaitable[Any]) -> int:
    with pytest.raises(Refused) as refused:
        await work
    return refused.value.status


def test_a_groups_episodes_are_played_and_become_its_payload(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request()))
        await asyncio.sleep(0)
        assert episodes.waiting == 2
        begun = [await episodes.begin(KEY) for _ in range(2)]
        assert [each.task for each in begun] == [request().task] * 2
        first, second = (episodes.episode(each.id, each.key) for each in begun)
        said = await episodes.call(first, call())
        await episodes.call(first, call(*HELLO, said.replies[0].message, Message("user", "and?")))
        await episodes.call(second, call())
        episodes.reward(first, 1.0)
        episodes.reward(second, 0.25, "call-3")
        await episodes.end(first, "completed")
        assert not playing.done()
        await episodes.end(second, "max_turns")
        group: GeneratedGroup = await playing
        payload = codec.decode(GroupPayload, group.payload)
        assert (group.group_id, group.rewards, payload.rows.tolist()) == (7, [1.0, 0.0], [1, 1])
        assert (group.oldest, group.newest) == (PolicyVersion(0, 1), PolicyVersion(0, 3))
        assert payload.prompt.tolist() == renderer.render(HELLO, ())
        assert [int(sample.loss_mask.sum()) for sample in payload.samples] == [2 + 3, 4]
        assert [(turn.row, turn.value) for turn in payload.turn_rewards] == [(1, 0.25)]
        assert episodes.counts["ended_completed"] == episodes.counts["ended_max_turns"] == 1

    run(renderer, scenario)


def test_what_a_program_plays_is_a_span_from_its_beginning_to_its_end(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[TracedSpan] = []
    monkeypatch.setattr(spans.log, "add", lambda *span, **more: told.append(TracedSpan(*span, **more)))

    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request()))
        await asyncio.sleep(0)
        for _ in range(2):
            episode = await opened(episodes)
            await episodes.call(episode, call())
            await episodes.end(episode)
        await playing

    run(renderer, scenario)
    assert [(span.name, span.line, span.group, span.detail) for span in told] == [
        (name, spans.EPISODES, 7, detail)
        for index in range(2)
        for name, detail in ((spans.POLICY, f"{index} "), ("run", f"{index} a program"))
    ]
    for asked, played in zip(told[::2], told[1::2], strict=True):
        assert played.start <= asked.start <= asked.end <= played.end


def test_the_tools_that_a_reply_calls_are_a_span_until_the_next_call(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[TracedSpan] = []
    monkeypatch.setattr(spans.log, "add", lambda *span, **more: told.append(TracedSpan(*span, **more)))

    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request(n=1)))
        episode = await opened(episodes)
        policy.tools = ("search", "add", "search", "made up " * 1000)
        await episodes.call(episode, call(tools=("search", "add")))
        policy.tools = ()
        await episodes.call(episode, call(*HELLO, Message("user", "again")))
        policy.tools = ("answer",)
        await episodes.call(episode, call(*HELLO, Message("user", "at last"), tools=("answer",)))
        await episodes.end(episode)
        await playing

    run(renderer, scenario)
    assert [(span.name, span.detail) for span in told] == [
        (spans.POLICY, "0 "),
        (spans.TOOL, "0 a program: search, add, unknown"),
        (spans.POLICY, "0 "),
        (spans.POLICY, "0 "),
        (spans.TOOL, "0 a program: answer"),
        ("run", "0 a program"),
    ]
    assert told[0].end <= told[1].start <= told[1].end <= told[2].end


def test_keys_give_access_to_one_episode_and_die_with_it(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request()))
        assert await refusal(episodes.begin("another")) == 401
        one, other = [await episodes.begin(KEY, PATIENCE) for _ in range(2)]
        assert one.key != other.key and len(one.key) > 20
        assert episodes.episode("", one.key) is episodes.episode(one.id, one.key)
        assert episodes.episode(one.key, "whatever a program sends") is episodes.episode(one.id, one.key)

        def status(id: str, key: str) -> int:
            with pytest.raises(Refused) as refused:
                episodes.episode(id, key)
            return refused.value.status

        assert [status(one.id, other.key), status(one.id, ""), status("", KEY), status("none", one.key)] == [401, 401, 401, 404]
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert [status(one.id, one.key), status(one.key, ""), status("", other.key)] == [404, 404, 401]

    run(renderer, scenario)


@pytest.mark.parametrize(("repeats", "again"), [("key:a", False), ("body:a", True), ("", True)])
def test_a_repeated_request_is_answered_once(renderer: TemplateRenderer, repeats: str, again: bool) -> None:
    """`again`: one that comes after the answer is another call."""

    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request()))
        await asyncio.sleep(0)
        episode = await opened(episodes)
        policy.gate.clear()
        calling = [asyncio.ensure_future(episodes.call(episode, call(repeats=repeats))) for _ in range(2)]
        await policy.began.get()
        policy.gate.set()
        answers = await asyncio.gather(*calling)
        same = bool(repeats)
        assert (answers[0] is answers[1], policy.calls, len(episode.graph.nodes)) == (same, 2 - same, 2 - same)
        await episodes.call(episode, call(repeats=repeats))
        assert policy.calls == 2 - same + again
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    run(renderer, scenario)


def test_a_client_that_hangs_up_withdraws_its_call_and_leaves_the_episode(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request()))
        await asyncio.sleep(0)
        episode = await opened(episodes)
        policy.gate.clear()
        hung_up, patient = (asyncio.ensure_future(episodes.call(episode, call(repeats="body:a"))) for _ in range(2))
        await policy.began.get()
        hung_up.cancel()
        await asyncio.gather(hung_up, return_exceptions=True)
        policy.gate.set()
        assert (await patient).id == "call-1"  # somebody else still waited
        policy.gate.clear()
        alone = asyncio.ensure_future(episodes.call(episode, call(repeats="body:b")))
        await policy.began.get()
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        for _ in range(5):  # the call's task is told
            await asyncio.sleep(0)
        assert not episodes.counts["under_way"]
        policy.gate.set()
        assert len(episode.graph.nodes) == 1 and not episode.over
        await episodes.call(episode, call())
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    run(renderer, scenario)


def test_what_an_environment_lost_is_played_again_from_the_task_on(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        groups: list[Playing] = []

        async def stay_away(group: Playing, index: int) -> None:
            groups.append(group)

        episodes.players = stay_away
        playing = asyncio.ensure_future(episodes.play(request(environment="game")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert episodes.waiting == 0 and await refusal(episodes.begin(KEY)) == 429  # it is nobody else's
        lost, kept = (episodes.open_one(groups[0], index) for index in range(2))
        assert episodes.episode(lost.id, lost.key) is lost
        await episodes.call(lost, call())
        policy.gate.clear()
        under_way = asyncio.ensure_future(episodes.call(lost, call()))
        await policy.began.get()
        await policy.began.get()
        episodes.play_again(lost, "it was lost")
        assert await refusal(under_way) == 404
        policy.gate.set()
        assert (episodes.open, episodes.counts["played_again"]) == (1, 1)
        again = episodes.open_one(groups[0], lost.index)
        assert (again.seed, again.graph.nodes) == (lost.seed, [])
        for episode in (again, kept):
            await episodes.call(episode, call())
            episodes.close_one(episode, "completed")
        group = await playing
        payload = codec.decode(GroupPayload, group.payload)
        assert payload.rows.tolist() == [1, 1] and payload.tokens.size
        assert group.outcomes is not None and group.outcomes.repeated == {"it was lost": 1}

    run(renderer, scenario)


def test_an_episode_that_is_never_ended_is_closed_at_its_deadline_with_what_is_there(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request()))
        await asyncio.sleep(0)
        first, second = await opened(episodes), await opened(episodes)
        await episodes.call(first, call())
        policy.gate.clear()
        under_way = asyncio.ensure_future(episodes.call(second, call()))
        group = await playing
        assert await refusal(under_way) == 404
        payload = codec.decode(GroupPayload, group.payload)
        assert [int(sample.loss_mask.sum()) for sample in payload.samples] == [2, 0]
        assert np.isnan(group.rewards).tolist() == [True, True]
        assert episodes.counts["ended_timeout"] == 2

    run(renderer, scenario, seconds=0.2)


def test_a_task_that_nobody_asks_for_is_told_at_the_deadline(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request()))
        await asyncio.sleep(0)
        await opened(episodes)
        with pytest.raises(DeadlineExceeded, match=r"gateway-0: Play: no program has asked for 1 of 2 episodes of group 7"):
            await playing
        assert (episodes.waiting, episodes.open) == (0, 0)

    run(renderer, scenario, seconds=0.2)


def test_a_group_in_which_the_policy_says_nothing_is_of_the_version_that_counts(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        playing = asyncio.ensure_future(episodes.play(request(n=1)))
        await asyncio.sleep(0)
        await episodes.end(await opened(episodes), "")
        group = await playing
        assert (group.oldest, group.newest, group.rewards) == (PolicyVersion(0, 4), PolicyVersion(0, 4), [])

    run(renderer, scenario, rewarded=True)


def test_what_is_too_much_and_what_is_not_known_is_refused(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        assert await refusal(episodes.begin(KEY)) == 429  # no task
        playing = asyncio.ensure_future(episodes.play(request()))
        await asyncio.sleep(0)
        episode = await opened(episodes)
        assert await refusal(episodes.begin(KEY)) == 429  # one at once
        assert await refusal(episodes.end(episode, "bored")) == 400
        for value, completion, expected in ((float("nan"), "", 400), (float("inf"), "call-1", 400), (1.0, "call-9", 404)):
            with pytest.raises(Refused) as refused:
                episodes.reward(episode, value, completion)
            assert refused.value.status == expected
        await episodes.end(episode, "completed")
        assert await refusal(episodes.call(episode, call())) == 404
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    run(renderer, scenario, most=1)


def test_where_the_gateway_serves_calls_need_no_episode(renderer: TemplateRenderer) -> None:
    async def scenario(episodes: Episodes, policy: ScriptedPolicy) -> None:
        assert not episodes.episode("", KEY).graph.nodes and not episodes.open
        own = await opened(episodes)
        assert own.group is None and (await episodes.call(own, call())).id == "call-1"

    run(renderer, scenario, serves=True)
