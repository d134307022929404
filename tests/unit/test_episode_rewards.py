"""What is read of an episode, who gives it its reward, and what an evaluation makes of that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import codec, config
from runtime.coordinator.roles import RewardScoring
from runtime.errors import InvariantViolated
from runtime.evaluation.sets import judge_of
from runtime.models import tiny_model
from runtime.rewards.combination import played
from runtime.rewards.remote import RemoteScorer
from runtime.rewards.remote_messages import RemoteItem, RemoteResult
from runtime.rewards.replies import last_turn, read_replies
from runtime.scoring.reward_model import ModelScorer, Texts
from runtime.types import GroupPayload, Sample, ScoreRequest, Scores
from tests.unit.reward_cases import make_branch, make_sample
from tests.unit.test_rewards_scorer import Bytes, score

NAN = float("nan")
ADDED = make_branch(("<sum>", True), ("tool: 5. Go on.", False), ("#### 5", True))
BRANCH = make_branch(("<sum>tool: 5. Go on.", False), ("It is 6", True), ("bye", False), finish="length")
UNPLAYED = make_branch(("asked", False))
REPLY = make_sample(list(b"#### 5"))


def request_of(episodes: Sequence[Sequence[Sample]], prompt: str = "2+3=", **more: Any) -> ScoreRequest:
    rows = [row for branches in episodes for row in branches]
    payload = GroupPayload.of(7, np.frombuffer(prompt.encode(), np.uint8).astype(np.int32), rows, list(map(len, episodes)))
    return ScoreRequest(group_id=7, label="5", payload=codec.encode(payload), **more)


EPISODES = [[ADDED], [ADDED, BRANCH], [REPLY], [UNPLAYED]]
READ = [
    ("#### 5", "<sum>tool: 5. Go on.#### 5"),
    ("It is 6", "<sum>tool: 5. Go on.It is 6bye"),
    ("#### 5", ""),
    ("", "asked"),
]


def test_the_text_is_the_last_turn_and_the_conversation_lies_beside_it() -> None:
    payload = codec.decode(GroupPayload, request_of(EPISODES).payload)
    assert [(each.text, each.conversation) for each in read_replies(payload, Bytes())] == READ


def test_a_reply_is_its_whole_self() -> None:
    """Also one without a token."""
    for reply in (REPLY, make_sample(list(b""))):
        assert np.array_equal(last_turn(reply), reply.tokens)


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


def test_rules_grade_the_last_answer_or_the_whole_conversation(tmp_path: Path) -> None:
    assert by_rules(tmp_path, request_of(EPISODES)) == {
        "answered": [1.0, 0.0, 1.0, 0.0],
        "used": [1.0, 1.0, 0.0, 0.0],
        "length": [len(ADDED.tokens), -1.0, 6.0, 5.0],
        "together": [len(text) + 100.0 * len(said) for text, said in READ],
    }


def test_replies_are_told_as_they_were(tmp_path: Path) -> None:
    found = by_rules(tmp_path, request_of([[REPLY], [make_sample(list(b"tool"))]]))
    assert found == {"answered": [1.0, 0.0], "used": [0.0, 1.0], "length": [6.0, 4.0], "together": [6.0, 4.0]}


def test_a_remote_reward_is_told_both() -> None:
    class Judge:
        async def score(self, items: Sequence[RemoteItem], timeout: float) -> list[RemoteResult]:
            self.items = items
            return [RemoteResult(value=float(len(item.conversation))) for item in items]

    judge = Judge()
    scorer = RemoteScorer(config.RemoteReward(name="judge", address="localhost:1"), Bytes(), judge, fail=False)
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


# ---------------------------------------------------------------------------------------------- by whoever plays


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
    roles: Any = SimpleNamespace(scorers={"rule_reward": Replicas(rules), "reward_model": Replicas()})
    return asyncio.run(RewardScoring(roles, weight).score(request_of([[REPLY]]), given, 0))


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


def test_a_group_that_nobody_gives_a_reward_ends_the_run() -> None:
    with pytest.raises(InvariantViolated, match="group 7: nobody gives it a reward"):
        summed([], 1.0)


def test_where_no_reward_is_looked_at_it_is_0_and_one_that_there_is_stays() -> None:
    for rules, rewards in (((), [0.0, 0.0, 0.0]), ((2.0, 3.0, 4.0), [2.0, 3.0, 4.0])):
        roles: Any = SimpleNamespace(scorers={"rule_reward": Replicas(rules), "reward_model": Replicas()})
        scores = asyncio.run(RewardScoring(roles, 1.0, unrewarded=3).score(request_of([[REPLY]]), [], 0))
        assert (scores.rewards.tolist(), scores.valid.tolist()) == (rewards, [1, 1, 1])
