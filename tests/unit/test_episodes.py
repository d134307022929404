"""Episodes of a gateway: tasks, players, keys, repeats, deadlines, groups, and the reward of an episode."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from runtime import config, types
from runtime.coordinator.pools import RewardScoring
from runtime.errors import DeadlineExceeded, InvariantViolated
from runtime.evaluation.results import judge_of
from runtime.gateway.conversation import Completion, Message, PolicyCall, PolicyReply, Refused, Tool, ToolCall
from runtime.gateway.episodes import EpisodeRun, Episodes, GatewayEpisode
from runtime.gateway.rendering import TemplateRenderer
from runtime.models import tiny_model
from runtime.process import spans
from runtime.process.spans import TracedSpan
from runtime.rewards.remote import RemoteItem, RemoteResult, RemoteScorer
from runtime.rewards.rules import answer_part
from runtime.rewards.scorer import last_turn, played, read_replies
from runtime.scoring.reward_model import ModelScorer, Texts
from runtime.types import (
    EpisodeTask,
    GeneratedGroup,
    GroupPayload,
    PolicyVersion,
    RunEpisodesRequest,
    Sample,
    SamplingParams,
    ScoreRequest,
    Scores,
)
from tests.coroutines import handed
from tests.unit.reward_cases import make_branch, make_sample
from tests.unit.template_cases import episodes_of, tiny_renderer
from tests.unit.test_rewards_scorer import Bytes, score

# ---- The episodes of a gateway: tasks and who plays them, keys, repeats, deadlines, and the group that comes of them

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
        self.malformed = False  # whether each reply begins a call that cannot be read

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
        reply = PolicyReply(message, tokens, logprobs, versions, "stop", malformed=self.malformed)
        episode.graph.add(extension, f"call-{number}", [reply])
        return Completion(id=f"call-{number}", created=0.0, model="m", prompt=extension.prompt, replies=(reply,))


def request(group_id: int = 7, n: int = 2, environment: str = "") -> RunEpisodesRequest:
    task = EpisodeTask(messages=[{"role": "user", "content": "hello"}], label="5", environment=environment)
    sampling = SamplingParams(max_new_tokens=8)
    return RunEpisodesRequest(group_id=group_id, task=task, n=n, seed=3, sampling=sampling, version=PolicyVersion(0, 4))


def run(renderer: TemplateRenderer, scenario: Callable[[Episodes, ScriptedPolicy], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        policy = ScriptedPolicy(renderer)
        episodes = episodes_of(renderer, policy, **settings)
        episodes.key = KEY
        await scenario(episodes, policy)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


scenario = functools.partial(handed, run, needs=("renderer",), first=2)


async def opened(episodes: Episodes) -> GatewayEpisode:
    begun = await episodes.begin(KEY)
    return episodes.episode(begun.id, begun.key)


def call(*messages: Message, repeats: str = "", tools: tuple[str, ...] = ()) -> PolicyCall:
    return PolicyCall(messages=messages or HELLO, repeats=repeats, tools=tuple(map(Tool, tools)))


async def refusal(work: Awaitable[Any]) -> int:
    with pytest.raises(Refused) as refused:
        await work
    return refused.value.status


@scenario()
async def test_a_groups_episodes_are_played_and_become_its_payload(
    episodes: Episodes, policy: ScriptedPolicy, renderer: TemplateRenderer
) -> None:
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
    payload = types.decode(GroupPayload, group.payload)
    assert (group.group_id, group.rewards, payload.rows.tolist()) == (7, [1.0, 0.0], [1, 1])
    assert (group.oldest, group.newest) == (PolicyVersion(0, 1), PolicyVersion(0, 3))
    assert payload.prompt.tolist() == renderer.render(HELLO, ())
    assert [int(sample.loss_mask.sum()) for sample in payload.samples] == [2 + 3, 4]
    assert [(turn.row, turn.value) for turn in payload.turn_rewards] == [(1, 0.25)]
    assert episodes.counts["ended_completed"] == episodes.counts["ended_max_turns"] == 1


@scenario()
async def test_the_tools_that_a_reply_calls_are_a_span_until_the_next_call(
    episodes: Episodes, policy: ScriptedPolicy, told: list[TracedSpan]
) -> None:
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
    assert [(span.name, span.detail) for span in told] == [
        (spans.POLICY, "0 "),
        (spans.TOOL, "0 a program: search, add, unknown"),
        (spans.POLICY, "0 "),
        (spans.POLICY, "0 "),
        (spans.TOOL, "0 a program: answer"),
        ("run", "0 a program"),
    ]
    assert told[0].end <= told[1].start <= told[1].end <= told[2].end


@scenario()
async def test_keys_give_access_to_one_episode_and_die_with_it(episodes: Episodes, policy: ScriptedPolicy) -> None:
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
    assert [status(one.id, "\udcff"), status("", "\udcff"), await refusal(episodes.begin("\udcff"))] == [401] * 3  # of no UTF-8
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert [status(one.id, one.key), status(one.key, ""), status("", other.key)] == [404, 404, 401]


@pytest.mark.parametrize(("repeats", "again"), [("key:a", False), ("body:a", True), ("", True)])
@scenario()
async def test_a_repeated_request_is_answered_once(
    episodes: Episodes, policy: ScriptedPolicy, repeats: str, again: bool
) -> None:
    """`again`: one that comes after the answer is another call."""
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


@scenario()
async def test_a_client_that_hangs_up_withdraws_its_call_and_leaves_the_episode(
    episodes: Episodes, policy: ScriptedPolicy
) -> None:
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


@scenario()
async def test_what_an_environment_lost_is_played_again_from_the_task_on(episodes: Episodes, policy: ScriptedPolicy) -> None:
    groups: list[EpisodeRun] = []

    async def stay_away(group: EpisodeRun, index: int) -> None:
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
    payload = types.decode(GroupPayload, group.payload)
    assert payload.rows.tolist() == [1, 1] and payload.tokens.size
    assert group.outcomes is not None and group.outcomes.repeated == {"it was lost": 1}


@scenario(seconds=0.2)
async def test_an_episode_that_is_never_ended_is_closed_at_its_deadline_with_what_is_there(
    episodes: Episodes, policy: ScriptedPolicy
) -> None:
    playing = asyncio.ensure_future(episodes.play(request()))
    await asyncio.sleep(0)
    first, second = await opened(episodes), await opened(episodes)
    await episodes.call(first, call())
    policy.gate.clear()
    under_way = asyncio.ensure_future(episodes.call(second, call()))
    group = await playing
    assert await refusal(under_way) == 404
    payload = types.decode(GroupPayload, group.payload)
    assert [int(sample.loss_mask.sum()) for sample in payload.samples] == [2, 0]
    assert np.isnan(group.rewards).tolist() == [True, True]
    assert episodes.counts["ended_timeout"] == 2


@scenario(seconds=0.2)
async def test_a_task_that_nobody_asks_for_is_told_at_the_deadline(episodes: Episodes, policy: ScriptedPolicy) -> None:
    playing = asyncio.ensure_future(episodes.play(request()))
    await asyncio.sleep(0)
    await opened(episodes)
    with pytest.raises(DeadlineExceeded, match=r"gateway-0: RunEpisodes: no program has asked for 1 of 2 episodes of group 7"):
        await playing
    assert (episodes.waiting, episodes.open) == (0, 0)


@scenario(rewarded=True)
async def test_a_group_in_which_the_policy_says_nothing_is_of_the_version_that_counts(
    episodes: Episodes, policy: ScriptedPolicy
) -> None:
    playing = asyncio.ensure_future(episodes.play(request(n=1)))
    await asyncio.sleep(0)
    await episodes.end(await opened(episodes), "")
    group = await playing
    assert (group.oldest, group.newest, group.rewards) == (PolicyVersion(0, 4), PolicyVersion(0, 4), [])


@scenario(most=1)
async def test_what_is_too_much_and_what_is_not_known_is_refused(episodes: Episodes, policy: ScriptedPolicy) -> None:
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


@scenario(serves=True)
async def test_where_the_gateway_serves_calls_need_no_episode(episodes: Episodes, policy: ScriptedPolicy) -> None:
    assert not episodes.episode("", KEY).graph.nodes and not episodes.open
    own = await opened(episodes)
    assert own.group is None and (await episodes.call(own, call())).id == "call-1"
    once, said = call(repeats="key:a"), Message("user", "another")
    none = [episodes.episode("", KEY) for _ in range(6)]  # calls of no episode
    first = await asyncio.gather(*(episodes.call(episode, once) for episode in none[:2]))
    others = [await episodes.call(none[2], each) for each in (once, call(said, repeats="key:a"), call(repeats="body:a"))]
    assert [each.id for each in (*first, *others)] == ["call-2", "call-2", "call-2", "call-3", "call-4"]
    with mock.patch("runtime.gateway.episodes.ANSWERED", 1):
        await episodes.call(none[3], call(repeats="key:b"))
    assert (await episodes.call(none[4], once)).id == "call-6", "the oldest is forgotten"
    assert (await episodes.call(own, once)).id == "call-7", "an episode has keys of its own"


# ---- What is read of an episode, who gives it its reward, and what an evaluation makes of that

NAN = float("nan")
ADDED = make_branch(("<sum>", True), ("tool: 5. Go on.", False), ("#### 5", True))
BRANCH = make_branch(("<sum>tool: 5. Go on.", False), ("It is 6", True), ("bye", False), finish="length")
UNPLAYED = make_branch(("asked", False))
REPLY = make_sample(list(b"#### 5"))


def request_of(episodes: Sequence[Sequence[Sample]], prompt: str = "2+3=", **more: Any) -> ScoreRequest:
    rows = [row for branches in episodes for row in branches]
    payload = GroupPayload.of(7, np.frombuffer(prompt.encode(), np.uint8).astype(np.int32), rows, list(map(len, episodes)))
    return ScoreRequest(group_id=7, label="5", payload=types.encode(payload), **more)


EPISODES = [[ADDED], [ADDED, BRANCH], [REPLY], [UNPLAYED]]
READ = [("#### 5", "<sum>tool: 5. Go on.#### 5"), ("It is 6", "<sum>tool: 5. Go on.It is 6bye"), ("#### 5", ""), ("", "asked")]


def test_the_text_is_the_last_turn_with_the_conversation_beside_it_and_a_reply_is_its_whole_self() -> None:
    """Also one without a token."""
    payload = types.decode(GroupPayload, request_of(EPISODES).payload)
    assert [(each.text, each.conversation) for each in read_replies(payload, Bytes())] == READ
    for reply in (REPLY, make_sample(list(b""))):
        assert np.array_equal(reply.tokens[last_turn(reply)], reply.tokens)


def test_a_thought_that_the_prompt_opens_is_part_of_the_reply() -> None:
    """Of the group's prompt, and of what stands before a later turn."""
    said = make_sample(list(b"1 </think> <answer>5</answer>"))
    for prompt, opened in (("2+3=<think>\n", "<think>\n"), ("<think> 2+3=", ""), ("2+3=<think>", "<think>")):
        payload = types.decode(GroupPayload, request_of([[said], [make_sample(list(b"<think>5"))], [UNPLAYED]], prompt).payload)
        texts = [each.text for each in read_replies(payload, Bytes())]
        assert texts == [f"{opened}1 </think> <answer>5</answer>", "<think>5", ""]
        assert bool(answer_part(texts[0])) is bool(opened)
    later = make_branch(("a</think>b", True), ("go on<think>\n", False), ("c</think>d", True))
    payload = types.decode(GroupPayload, request_of([[later]], "<think>").payload)
    (reply,) = read_replies(payload, Bytes())
    assert reply.text == "<think>\nc</think>d"
    assert reply.conversation == "<think>a</think>bgo on<think>\nc</think>d"


RULES = """
from runtime.rewards.rules import GroupContext, RuleContext, group_rule, rule

@rule("NAME_answered")
def answered(text: str, label: str, context: RuleContext) -> bool:
    return text == "#### " + label

@rule("NAME_used")
def used(text: str, label: str, context: RuleContext) -> bool:
    return "tool" in (context.conversation or text)

@rule("NAME_length")
def length(text: str, label: str, context: RuleContext) -> float:
    return context.tokens if context.finish_reason == "stop" else -1.0

@group_rule("NAME_together")
def together(texts: list[str], label: str, context: GroupContext) -> list[float]:
    return [len(text) + 100 * len(said) for text, said in zip(texts, context.conversations or [""] * len(texts), strict=True)]
"""


def by_rules(tmp_path: Path, request: ScoreRequest) -> dict[str, list[float]]:
    name = f"rules_{tmp_path.name}"
    (tmp_path / "own.py").write_text(RULES.replace("NAME", name))
    kinds = ("answered", "used", "length", "together")
    rules = [config.Rule(name=f"{tmp_path}/own.py:{name}_{kind}") for kind in kinds]
    scores = score(config.Rewards(rules=rules), request)
    assert scores.valid.tolist() == [1] * len(scores.rewards)
    return dict(zip(kinds, (values.tolist() for values in scores.rules.values()), strict=True))


def test_rules_grade_the_last_answer_or_the_whole_conversation_and_are_told_replies_as_they_were(tmp_path: Path) -> None:
    assert by_rules(tmp_path, request_of(EPISODES)) == {
        "answered": [1.0, 0.0, 1.0, 0.0],
        "used": [1.0, 1.0, 0.0, 0.0],
        "length": [len(ADDED.tokens), -1.0, 6.0, 5.0],
        "together": [len(text) + 100.0 * len(said) for text, said in READ],
    }
    found = by_rules(tmp_path, request_of([[REPLY], [make_sample(list(b"tool"))]]))
    assert found == {"answered": [1.0, 0.0], "used": [0.0, 1.0], "length": [6.0, 4.0], "together": [6.0, 4.0]}


def test_a_remote_reward_is_told_both() -> None:
    class Judge:
        async def score(self, items: Sequence[RemoteItem], timeout: float) -> list[RemoteResult]:
            self.items = items
            return [RemoteResult(value=float(len(item.conversation))) for item in items]

    judge = Judge()
    scorer = RemoteScorer(config.RemoteReward(name="judge", address="localhost:1"), Bytes(), judge.score, fail=False)
    scores = asyncio.run(scorer.score(request_of(EPISODES)))
    assert [(item.text, item.conversation) for item in judge.items] == READ
    assert [(item.tokens, item.finish_reason) for item in judge.items] == [
        (len(rows[-1].tokens), rows[-1].finish_reason) for rows in EPISODES
    ]
    assert scores.rewards.tolist() == [float(len(said)) for _, said in READ]


class Reads:
    """A classifier that keeps what it reads."""

    vocab_size, positions = 512, 1000

    def score(self, groups: Texts) -> list[np.ndarray]:
        self.read = [bytes(text.astype(np.uint8)) for group in groups for text in group]
        return [np.arange(len(group), dtype=np.float32) for group in groups]


@pytest.fixture
def policy(tmp_path: Path) -> str:
    tiny_model.write_tokenizer(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("prompt", ["2+3=", ""])
def test_a_reward_model_reads_prompt_and_last_branch(policy: str, prompt: str) -> None:
    model = Reads()
    scorer = ModelScorer(config.RewardModel(path=policy, input="tokens"), policy, model, fail=False)
    yes, abandoned = (make_branch(("ask", False), (text, True)) for text in ("yes", "no"))
    episodes = [[yes], [abandoned, make_branch(("ask", False), ("a", True), ("b", False), ("c", True))]]
    (scores,) = scorer.score([request_of(episodes, prompt)])
    assert model.read == [prompt.encode() + text for text in (b"askyes", b"askabc")]
    assert scores.rewards.tolist() == [0.0, 1.0]


def test_a_reward_model_of_its_own_reads_all_that_was_said(policy: str) -> None:
    model = Reads()
    scorer = ModelScorer(config.RewardModel(path=policy, input="text"), policy, model, fail=False)
    scorer.score([request_of(EPISODES[1:3], messages=[{"role": "user", "content": "2+3="}])])
    assert [b"<sum>tool: 5. Go on.It is 6bye" in model.read[0], b"#### 5" in model.read[1]] == [True, True]


def test_who_plays_gives_a_column_and_where_it_gives_nothing_the_episode_is_masked() -> None:
    scores = played(7, 0.5, [1.0, NAN, -2.0])
    assert (scores.group_id, scores.rewards.tolist(), scores.valid.tolist()) == (7, [0.5, 0.0, -1.0], [1, 0, 1])
    np.testing.assert_array_equal(scores.rules["environment"], np.array([1.0, NAN, -2.0], np.float32))
    assert scores.errors == {"environment:no reward": 1}


class Replicas(list[float]):
    """A role whose replicas answer so; with nothing in it, the run has none."""

    async def ask(self, turn: int, request: ScoreRequest, *told: Any) -> Scores:
        values = np.array(self, np.float32)
        return Scores(
            group_id=request.group_id, rewards=values, valid=np.ones(len(self), np.uint8), rules={"mine": values}, answers=["5"]
        )


def summed(given: list[float], weight: float, *rules: float) -> Scores:
    scorers: Any = {"rule_reward": Replicas(rules), "reward_model": Replicas()}
    return asyncio.run(RewardScoring(scorers, weight).score(request_of([[REPLY]]), given, 0))


@pytest.mark.parametrize(
    ("given", "weight", "rules", "rewards", "valid", "columns"),
    [
        ([1.0, 0.0], 0.5, (2.0, 3.0), [2.5, 3.0], [1, 1], ["mine", "environment"]),
        ([1.0, NAN], 0.5, (2.0, 3.0), [2.5, 0.0], [1, 0], ["mine", "environment"]),
        ([1.0, NAN], 0.0, (2.0, 3.0), [2.0, 3.0], [1, 1], ["mine"]),  # not looked at: the rules alone
        ([1.0, -1.0], 2.0, (), [2.0, -2.0], [1, 1], ["environment"]),  # and without any
        ([], 1.0, (2.0, 3.0), [2.0, 3.0], [1, 1], ["mine"]),  # replies, which nobody played
    ],
)
def test_what_it_gives_is_added_to_the_others(
    given: list[float], weight: float, rules: tuple[float, ...], rewards: list[float], valid: list[int], columns: list[str]
) -> None:
    scores = summed(given, weight, *rules)
    assert (scores.rewards.tolist(), scores.valid.tolist(), list(scores.rules)) == (rewards, valid, columns)
    assert scores.answers == (["5"] if rules else []), "an answer is named by the rules"


def test_evaluations_are_judged_by_the_first_rule_else_by_who_plays() -> None:
    def judge(**sections: Any) -> tuple[str, float] | None:
        found = judge_of(config.Config(run=config.Run(name="a"), model=config.Model(path="m"), **sections))
        return found and (found.name, found.correct)

    rule = config.Rewards(rules=[config.Rule(name="gsm8k", correct=2.0)])
    assert judge(rewards=rule, gateway=config.Gateway()) == ("gsm8k", 2.0)
    assert judge(gateway=config.Gateway()) == ("environment", 1.0)
    assert judge() is None
    assert judge(gateway=config.Gateway(), rewards=config.Rewards(environment=0.0)) is None


def test_a_group_that_nobody_gives_a_reward_ends_the_run_unless_none_is_looked_at() -> None:
    with pytest.raises(InvariantViolated, match="group 7 has no reward: "):
        summed([], 1.0)
    for rules, rewards in (((), [0.0, 0.0, 0.0]), ((2.0, 3.0, 4.0), [2.0, 3.0, 4.0])):
        scorers: Any = {"rule_reward": Replicas(rules), "reward_model": Replicas()}
        scores = asyncio.run(RewardScoring(scorers, 1.0, unrewarded=3).score(request_of([[REPLY]]), [], 0))
        assert (scores.rewards.tolist(), scores.valid.tolist()) == (rewards, [1, 1, 1])
