"""Advantages of episodes with several branches and with rewards of turns, against loops in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.interfaces import ADVANTAGES, AdvantageInputs, AdvantageOptions, TurnRewards

pytestmark = pytest.mark.numeric


class Row(NamedTuple):
    """A branch: whether each token is trained, and what turns earned, by their last token."""

    mask: list[int]
    turns: dict[int, float]


class Episode(NamedTuple):
    group: int
    reward: float
    valid: bool
    rows: list[Row]


def inputs_of(episodes: list[Episode], **more: Any) -> AdvantageInputs:
    """As the trainer makes them."""
    rows = [(episode, index, row) for episode in episodes for index, row in enumerate(episode.rows)]
    width = max(len(row.mask) for _, _, row in rows)
    mask = torch.tensor([[m * episode.valid for m in row.mask] + [0] * (width - len(row.mask)) for episode, _, row in rows])
    turns = [
        (at, token, value) for at, (episode, _, row) in enumerate(rows) for token, value in row.turns.items() if episode.valid
    ]
    where = [torch.tensor([turn[field] for turn in turns], dtype=torch.int64) for field in (0, 1)]
    values = torch.tensor([value for _, _, value in turns], dtype=torch.float64)
    rewards = torch.tensor([episode.reward if episode.valid else 0.0 for episode, _, _ in rows], dtype=torch.float64)
    return AdvantageInputs(
        rewards=rewards,
        groups=torch.tensor([episode.group for episode, _, _ in rows]),
        valid=torch.tensor([episode.valid for episode, _, _ in rows]),
        mask=mask.double(),
        token_rewards=mask.double(),  # of no use here
        leads=torch.tensor([index == 0 for _, index, _ in rows]),
        turns=TurnRewards(*where, values) if turns else None,
        **more,
    )


@st.composite
def batches(draw: st.DrawFn, turns: bool = True) -> list[Episode]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.3, 0.8, 1.0]))
    episodes = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            rows = []
            for _ in range(rng.integers(1, 4)):
                mask = (rng.random(rng.integers(1, 10)) < 0.6).astype(int).tolist()
                ends = [t for t, m in enumerate(mask) if m and not any(mask[t + 1 : t + 2])]
                rows.append(Row(mask, {t: float(rng.normal()) for t in ends if turns and rng.random() < share}))
            episodes.append(Episode(group, float(rng.normal()), bool(rng.random() < 0.8), rows))
    return episodes


# ---------------------------------------------------------------------------------------------- the same by plain loops


def normalised(value: float, others: list[float], everything: list[list[float]], name: str, options: AdvantageOptions) -> float:
    """`value`, one of those of a group; `others`: those of its other episodes; `everything`: of the group, and the batch."""
    group, batch = everything
    if name == "rloo":
        return value - sum(others) / len(others) if others else value
    mean = sum(group) / len(group) if len(group) > 1 else 0.0
    if name != "group_norm" or options.group_std == "none":
        return value - mean
    if options.group_std == "batch":
        centre = sum(batch) / len(batch)
        return (value - mean) / (
            math.sqrt(sum((x - centre) ** 2 for x in batch) / max(len(batch) - options.ddof, 1)) + options.eps
        )
    spread = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - options.ddof)) if len(group) > 1 else 1.0
    return (value - mean) / (spread + options.eps)


def turn_of(mask: list[int], token: int) -> int:
    """Which run of trained tokens it is in, or the last one before it."""
    return sum(m and not (t and mask[t - 1]) for t, m in enumerate(mask[: token + 1])) - 1


def plain(episodes: list[Episode], name: str, options: AdvantageOptions) -> list[list[float]]:
    """Of each row of each episode, a number for each token; 0 where it is not trained."""
    counted = [episode for episode in episodes if episode.valid]
    found = []
    for episode in episodes:
        same = [other for other in counted if other.group == episode.group]
        others = [other for other in same if other is not episode]

        def turns(of: list[Episode]) -> list[float]:
            return [value for each in of for row in each.rows for value in row.turns.values()]

        def rewards(of: list[Episode]) -> list[float]:
            return [each.reward for each in of]

        for row in episode.rows:
            if not episode.valid:
                found.append([0.0] * len(row.mask))
                continue
            whole = normalised(episode.reward, rewards(others), [rewards(same), rewards(counted)], name, options)
            earned = {
                token: normalised(value, turns(others), [turns(same), turns(counted)], name, options)
                for token, value in row.turns.items()
            }
            numbers = []
            for t, m in enumerate(row.mask):
                later = [(turn_of(row.mask, token) - turn_of(row.mask, t), value) for token, value in earned.items()]
                numbers.append(m * (whole + sum(options.turn_discount**far * value for far, value in later if far >= 0)))
            found.append(numbers)
    return found


CASES: list[tuple[str, AdvantageOptions]] = [
    ("group_norm", AdvantageOptions()),
    ("group_norm", AdvantageOptions(group_std="none", turn_discount=0.7)),
    ("group_norm", AdvantageOptions(group_std="batch", ddof=0, eps=1e-3, turn_discount=0.5)),
    ("rloo", AdvantageOptions(turn_discount=0.9)),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=80)
@given(batches())
def test_an_episode_counts_once_and_its_turns_reach_the_tokens_before_them(
    name: str, options: AdvantageOptions, episodes: list[Episode]
):
    got = ADVANTAGES.find(name).compute(inputs_of(episodes), options)
    mask = inputs_of(episodes).mask
    for row, expected in enumerate(plain(episodes, name, options)):
        found = (got.expand_as(mask)[row] * mask[row]).numpy()[: len(expected)]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=60)
@given(batches())
def test_the_baseline_is_whitened_with_turns_and_branches(episodes: list[Episode]):
    options = AdvantageOptions(turn_discount=0.8)
    got = ADVANTAGES.find("reinforce_plus_plus_baseline").compute(inputs_of(episodes), options).numpy()
    rows = plain(episodes, "reinforce_plus_plus_baseline", options)
    masks = [[m * episode.valid for m in row.mask] for episode in episodes for row in episode.rows]
    kept = [x for numbers, mask in zip(rows, masks, strict=True) for x, m in zip(numbers, mask, strict=True) if m]
    if len(kept) < 2:
        return
    mean, deviation = np.mean(kept), math.sqrt(np.var(kept, ddof=1) + 1e-8)
    for row, (numbers, mask) in enumerate(zip(rows, masks, strict=True)):
        expected = [m * (x - mean) / deviation for x, m in zip(numbers, mask, strict=True)]
        np.testing.assert_allclose(got[row, : len(mask)], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["group_norm", "rloo"])
@settings(max_examples=40)
@given(batches(turns=False), st.randoms())
def test_more_branches_of_an_episode_change_nobody_s_advantage(name: str, episodes: list[Episode], chance: Any):
    def values(of: list[Episode]) -> list[float]:
        got = ADVANTAGES.find(name).compute(inputs_of(of), AdvantageOptions())
        assert got.shape[1] == 1, "without rewards of turns a row has one advantage"
        return got[inputs_of(of).leads, 0].tolist()

    branched = [episode._replace(rows=episode.rows * chance.randint(1, 3)) for episode in episodes]
    assert values(branched) == values(episodes)


@pytest.mark.parametrize("estimator", sorted({name for name, _ in CASES} | {"reinforce_plus_plus_baseline", "opo", "gpg"}))
def test_replies_are_episodes_of_one_row(estimator: str):
    """Bit for bit, with and without the field that tells of episodes."""
    rng = np.random.default_rng(3)
    replies = [Episode(index // 3, float(rng.normal()), index != 4, [Row([1, 0, 1, 1], {})]) for index in range(9)]
    told = inputs_of(replies)
    compute: Callable[..., torch.Tensor] = ADVANTAGES.find(estimator).compute
    untold = AdvantageInputs(told.rewards, told.groups, told.valid, told.mask, told.token_rewards)
    assert torch.equal(compute(told, AdvantageOptions()), compute(untold, AdvantageOptions()))


def test_a_single_reward_of_a_turn_keeps_its_value_and_equal_ones_are_worth_nothing():
    """As an episode that is alone in its group, and as episodes of equal rewards."""
    alone = [Episode(0, 1.0, True, [Row([1, 1], {1: 0.5})]), Episode(0, 1.0, True, [Row([1, 1], {})])]
    equal = [Episode(0, 1.0, True, [Row([1, 0, 1], {0: 0.1, 2: 0.1})]), Episode(0, 1.0, True, [Row([1, 1, 1], {2: 0.1})])]
    for name in ("group_norm", "rloo"):
        got = ADVANTAGES.find(name).compute(inputs_of(alone), AdvantageOptions(eps=1e-12))
        assert got.tolist() == [[pytest.approx(0.5)] * 2, [0.0, 0.0]]
        assert not ADVANTAGES.find(name).compute(inputs_of(equal), AdvantageOptions()).any()


def test_sums_over_the_batch_are_asked_for_as_often_where_no_turn_was_rewarded():
    """Other parts may have some: each part takes part in each sum."""
    counts = []
    for turns in ({}, {1: 0.5}):
        calls: list[torch.Tensor] = []

        def batch_sum(part: torch.Tensor, calls: list[torch.Tensor] = calls) -> torch.Tensor:
            calls.append(part)
            return part

        part = inputs_of([Episode(0, float(reward), True, [Row([1, 1], turns)]) for reward in range(3)], batch_sum=batch_sum)
        ADVANTAGES.find("group_norm").compute(part, AdvantageOptions(group_std="batch"))
        counts.append([call.shape for call in calls])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["opo", "gpg"])
def test_turns_are_less_the_mean_of_their_group(name: str):
    """Of turns 0.5, 0.2 and 0.8; the rewards themselves tell nothing."""
    episodes = [
        Episode(0, 1.0, True, [Row([1, 0, 1], {0: 0.5, 2: 0.2})]),
        Episode(0, 1.0, True, [Row([1, 1, 0], {1: 0.8})]),
    ]
    got = ADVANTAGES.find(name).compute(inputs_of(episodes), AdvantageOptions(turn_discount=0.5))
    scale = 1.0 if name == "opo" else 2.0  # samples over at least one of a group with signal
    expected = [[0.5 * -0.3, -0.3, -0.3], [0.3, 0.3, 0.0]]
    for row, numbers in enumerate(expected):
        for token, number in enumerate(numbers):
            if episodes[row].rows[0].mask[token]:
                assert float(got[row, token]) == pytest.approx(scale * number, abs=1e-12)
