"""A step's figures from their parts, and the arithmetic of spans."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from runtime.config import Config, Critic, Run
from runtime.telemetry import metrics
from runtime.telemetry.metric_names import mindspeed, ours, score_prefixes
from runtime.telemetry.metrics import PublicationFigures, SpanClock, StepFigures, covered, intersection, step_metrics, union
from runtime.types import GeneratedGroup, Outcomes, PolicyVersion, Scores, StepResult


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def generated(prompt: int, responses: list[int], truncated: int = 0) -> GeneratedGroup:
    return GeneratedGroup(
        group_id=1,
        prompt_tokens=prompt,
        response_tokens=responses,
        truncated=truncated,
        oldest=PolicyVersion(),
        newest=PolicyVersion(),
        payload=b"",
    )


def scored(rewards: list[float], valid: list[int], **rules: list[float]) -> Scores:
    return Scores(
        group_id=1,
        rewards=np.array(rewards, np.float32),
        valid=np.array(valid, np.uint8),
        rules={rule: np.array(values, np.float32) for rule, values in rules.items()},
    )


def figures(**changes: object) -> StepFigures:
    fields: dict[str, object] = {
        "generated": [generated(10, [4, 8], truncated=1), generated(20, [6, 2])],
        "scores": [scored([1.0, 0.5], [1, 1], accuracy=[1, 0], format=[0, 1]), scored([0.0, 9.0], [1, 0], accuracy=[0, 9])],
        "staleness": [0, 2, 2, 1],
        "timing": {"timing/all": 0.5, "timing/rollout": 0.4, "timing/update": 0.2},
        "trained": StepResult(metrics={"actor/pg_loss": -0.1, "actor/grad_norm": 0.3}, seconds=0.2),
        "world_size": 4,
        "queues": {"ready": 3},
        "idle": {"trainer": 0.25},
        "rollouts": {"rollout/serving": 2.0},
        "publication": PublicationFigures(seconds=0.1, pause_seconds=0.01, bytes=1000, aborts=1, epoch=3),
    }
    return StepFigures(**(fields | changes))  # type: ignore[arg-type]


def test_throughput_recomputed_from_its_parts() -> None:
    found = step_metrics(figures())
    # (response_mean + prompt_mean) · global_batch_size · n / world_size / time, in exact arithmetic
    response_mean, prompt_mean = Fraction(4 + 8 + 6 + 2, 4), Fraction(10 + 20, 2)
    tokens = (response_mean + prompt_mean) * 2 * 2 / 4
    assert found["e2e_tps"] == pytest.approx(float(tokens / Fraction(1, 2)), rel=1e-12)
    assert found["update_tps"] == pytest.approx(float(tokens / Fraction(1, 5)), rel=1e-12)
    assert found["rollout_tps"] == pytest.approx(float(tokens / Fraction(2, 5)), rel=1e-12)
    from_names = (found["response_length/mean"] + found["prompt_length/mean"]) * found["samples"] / 4 / found["timing/all"]  # type: ignore[operator]
    assert found["e2e_tps"] == pytest.approx(from_names)


def test_a_step_has_every_name_that_applies() -> None:
    assert step_metrics(figures()) == {
        "timing/all": 0.5,
        "timing/rollout": 0.4,
        "timing/update": 0.2,
        "prompt_length/mean": 15.0,
        "prompt_length/max": 20.0,
        "prompt_length/min": 10.0,
        "response_length/mean": 5.0,
        "response_length/max": 8.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.25,
        "score/masked": 1.0,
        "score/mean": 0.5,
        "score/max": 1.0,
        "score/min": 0.0,
        "accuracy_rewards/mean": pytest.approx(1 / 3),
        "format_rewards/mean": 0.5,
        "staleness/mean": 1.25,
        "staleness/max": 2.0,
        "staleness/histogram": {0: 1, 1: 1, 2: 2},
        "e2e_tps": 40.0,
        "update_tps": pytest.approx(100.0),
        "rollout_tps": pytest.approx(50.0),
        "actor/pg_loss": -0.1,
        "actor/grad_norm": 0.3,
        "queue/ready": 3.0,
        "idle/trainer": 0.25,
        "publication/seconds": 0.1,
        "publication/pause_seconds": 0.01,
        "publication/bytes": 1000.0,
        "publication/aborts": 1.0,
        "publication/epoch": 3.0,
        **{f"publication/{phase}_seconds": 0.0 for phase in ("gather", "wait", "copy", "hash", "stage", "swap")},
        "rollout/serving": 2.0,
        "world_size": 4.0,
        "global_batch_size": 2.0,
        "n_samples_per_prompt": 2.0,
        "incarnation": 0.0,
        "samples": 4.0,
        "tokens": 20.0,
    }


def test_throughput_follows_from_the_sizes_that_are_logged() -> None:
    found = step_metrics(figures(incarnation=2))
    tokens = (found["response_length/mean"] + found["prompt_length/mean"]) * found["global_batch_size"]  # type: ignore[operator]
    each = tokens * found["n_samples_per_prompt"] / found["world_size"] / found["timing/all"]
    assert found["e2e_tps"] == pytest.approx(each) and found["incarnation"] == 2.0
    uneven = metrics.size_metrics([generated(10, [1]), generated(40, [2, 3])], 8)
    assert uneven == {"world_size": 8.0, "global_batch_size": 2.0, "n_samples_per_prompt": 1.5}


def test_names_of_mindspeed_rl_and_ours_name_the_same_numbers() -> None:
    found = step_metrics(figures())
    theirs = mindspeed(found, score_prefixes(Config(run=Run(name="a"), critic=Critic())))
    for part in ("mean", "max", "min"):
        assert theirs[f"grpo/score/{part}"] == theirs[f"critic/score/{part}"] == found[f"score/{part}"]
    assert theirs["vllm_tps"] == found["rollout_tps"] and theirs["grad_norm"] == theirs["actor/grad_norm"] == 0.3
    assert not any(name.startswith(("dapo/", "score/")) for name in theirs)
    assert ours(theirs) == ours(found) == found


def test_groups_of_different_sizes_weigh_by_sample() -> None:
    found = metrics.length_metrics([generated(10, [1]), generated(40, [2, 3])])
    assert (found["prompt_length/mean"], found["response_length/mean"]) == (30.0, 2.0)


def test_samples_are_episodes_and_lengths_are_of_their_branches() -> None:
    played = structs.replace(
        generated(10, [4, 8, 6], truncated=1), rewards=[1.0, float("nan")]
    )  # two, of three branches in all
    found = step_metrics(figures(generated=[played, generated(20, [6, 2])], staleness=[1, 1, 0, 0]))
    assert (found["samples"], found["tokens"], found["n_samples_per_prompt"]) == (4.0, 26.0, 2.0)
    assert (found["response_length/mean"], found["response_length/clip_ratio"]) == (26 / 5, 1 / 5)
    # All rows' tokens with their prompts, by accelerator and second.
    assert found["e2e_tps"] == pytest.approx((26 + 3 * 10 + 2 * 20) / 4 / 0.5)


def test_masked_samples_are_counted_by_reason() -> None:
    one, other = scored([0.0, 1.0, 0.0], [0, 1, 0]), scored([0.0], [0])
    one.errors, other.errors = {"timeout": 1, "remote:UNAVAILABLE": 1}, {"timeout": 1}
    found = metrics.score_metrics([one, other])
    assert {name: value for name, value in found.items() if "errors" in name} == {
        "score/errors/timeout": 2.0,
        "score/errors/remote:UNAVAILABLE": 1.0,
    }
    other.errors = {f"remote:{i}": 1 for i in range(100)}
    named = [name for name in metrics.score_metrics([one, one, other]) if "errors" in name]
    assert named[:2] == ["score/errors/timeout", "score/errors/remote:UNAVAILABLE"]
    assert len(named) == 8


def test_masked_samples_never_count_as_zero() -> None:
    assert metrics.score_metrics([scored([5.0, 5.0], [0, 0], accuracy=[5, 5])]) == {"score/masked": 2.0}
    assert metrics.score_metrics([scored([2.0, 7.0], [1, 0])])["score/mean"] == 2.0
    # A rule whose samples were all masked has no mean, even where another group's samples are valid.
    found = metrics.score_metrics([scored([1.0], [1], a=[1]), scored([1.0], [0], b=[1])])
    assert "b_rewards/mean" not in found and found["a_rewards/mean"] == 1.0


def test_failures_of_rules_are_counted_by_reason() -> None:
    one, other = scored([1.0, 0.0], [1, 0], a=[1, 0]), scored([0.0, 0.0], [0, 0], a=[0, 0])
    one = structs.replace(one, errors={"timeout": 1})
    other = structs.replace(other, errors={"timeout": 2, "exception:ValueError": 1})
    found = metrics.score_metrics([one, other])
    assert (found["score/errors/timeout"], found["score/errors/exception:ValueError"]) == (3.0, 1.0)


def test_what_was_not_measured_is_left_out() -> None:
    found = step_metrics(figures(generated=[], scores=[], staleness=[], timing={"timing/all": 1.0}, publication=None))
    assert found["update_tps"] == found["rollout_tps"] == 0.0
    assert not {"staleness/mean", "score/mean", "publication/seconds"} & found.keys()


def test_idle_fraction() -> None:
    assert metrics.idle_fraction(3.0, 4.0) == 0.25
    assert metrics.idle_fraction(5.0, 4.0) == 0.0
    assert metrics.idle_fraction(1.0, 0.0) == 0.0


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def cells(found: Sequence[tuple[float, float]]) -> set[int]:
    """A span on integers, as the unit cells it covers."""
    return {cell for start, end in found for cell in range(int(start), int(end))}


@given(spans, spans)
def test_spans_against_sets_of_cells(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    merged = union(left)
    assert cells(merged) == cells(left)
    assert all(merged[i][1] < merged[i + 1][0] for i in range(len(merged) - 1))
    assert covered(left) == len(cells(left))
    assert cells(intersection(left, right)) == cells(left) & cells(right)


def test_the_clock_accounts_phases_once_and_splits_them_at_steps() -> None:
    clock = Clock()
    spans = SpanClock(clock)
    with spans.span("rollout"):  # runs through both steps, in two replicas
        with spans.span("rollout"):
            clock.now = 101.0
            spans.add("rule_reward", 99.0, 100.5)  # began before the step
            spans.add("rule_reward", 100.25, 100.75)
            spans.add("update", 100.5, 101.0)
        clock.now = 102.0
        assert spans.close_step() == {
            "timing/all": 2.0,
            "timing/rollout": 2.0,
            "timing/rule_reward": 0.75,
            "timing/update": 0.5,
            "timing/non_overlap_rule_reward": 0.5,
        }
        clock.now = 105.0
    with pytest.raises(RuntimeError), spans.span("reward_model"):
        clock.now = 106.0
        raise RuntimeError
    assert spans.close_step() == {
        "timing/all": 4.0,
        "timing/rollout": 3.0,
        "timing/reward_model": 1.0,
        "timing/non_overlap_reward_model": 1.0,
    }
    clock.now = 107.0
    assert spans.close_step() == {"timing/all": 1.0}


def test_overlapping_phases_sum_to_more_than_the_step() -> None:
    clock = Clock()
    spans = SpanClock(clock)
    with spans.span("rollout"), spans.span("update"), spans.span("reference_model"):
        clock.now += 3.0
    timing = spans.close_step()
    assert timing["timing/all"] == 3.0 < timing["timing/rollout"] + timing["timing/update"]
    assert timing["timing/non_overlap_reference_model"] == 0.0


# ---------------------------------------------------------------------------------------------------------- environments


def played(environment: str, reasons: list[str], turns: list[int], **rest: Any) -> GeneratedGroup:
    outcomes = Outcomes(environment=environment, reasons=reasons, turns=turns, **rest)
    return structs.replace(generated(10, [4, 8]), outcomes=outcomes)


def test_each_environment_has_figures_of_its_own() -> None:
    groups = [
        played("maze", ["completed", "max_turns"], [1, 4], log={"moves": (2, 6.0)}, repeated={"a": 1, "b": 2}),
        generated(10, [4, 8]),
        played("shop", ["completed", "completed"], [2, 2]),
        played("maze", ["completed", "left out: slow"], [3, 0], log={"moves": (1, 9.0), "walls": (1, 0.5)}),
    ]
    scores = [scored([1.0, 0.0], [1, 1]), scored([9.0, 9.0], [1, 1]), scored([0.5, 0.25], [1, 1]), scored([0.5, 7.0], [1, 0])]
    assert metrics.environment_metrics(groups, scores) == {
        "environment/maze/reward": 0.5,
        "environment/maze/episodes": 4.0,
        "environment/maze/turns": 2.0,
        "environment/maze/repeated": 3.0,
        "environment/maze/left_out": 1.0,
        "environment/maze/ended/completed": 2.0,
        "environment/maze/ended/max_turns": 1.0,
        "environment/maze/log/moves": 5.0,
        "environment/maze/log/walls": 0.5,
        "environment/shop/reward": 0.375,
        "environment/shop/episodes": 2.0,
        "environment/shop/turns": 2.0,
        "environment/shop/repeated": 0.0,
        "environment/shop/left_out": 0.0,
        "environment/shop/ended/completed": 2.0,
    }
    assert "environment/shop/reward" in step_metrics(figures(generated=groups, scores=scores))


def test_what_no_environment_plays_has_none_of_these_figures() -> None:
    assert metrics.environment_metrics([played("", ["completed"], [1]), generated(1, [1])], [scored([1.0], [1])] * 2) == {}


def test_an_environment_of_which_nothing_is_trained_has_no_reward() -> None:
    found = metrics.environment_metrics([played("maze", ["left out: slow"], [1])], [scored([1.0], [0])])
    assert "environment/maze/reward" not in found and found["environment/maze/left_out"] == 1.0
