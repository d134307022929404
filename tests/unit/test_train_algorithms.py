"""The configured algorithm in the training engine, for replies and episodes, however a step is packed and cut."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime import types
from runtime.config import Critic
from runtime.config.loading import load, preset_names
from runtime.trainer import rows as train_rows
from runtime.trainer.rows import Needs
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer
from runtime.types import GroupPayload, Logprobs, Runs, Sample, TrainGroup, Values
from tests.closeness import STEP, assert_close
from tests.unit.training_cases import VOCAB, make_config, make_episodes, make_groups
from tests.unit.training_oracle import Oracle
from tests.unit.training_steps import LOSS_TERMS, assert_metrics, assert_same, assert_updated, comparable, run_step, weights

pytestmark = pytest.mark.numeric

SMOOTH = {"eps": 1e-2, "max_grad_norm": 0.0}
REINFORCE = {"advantage": "reinforce_plus_plus", "gamma": 0.9, "kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.1}
CAP = 0.05  # below the weights of some samples of a random policy
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "algorithms.md"
# Adam's first step is lr · g / (|g| + eps): with a large eps it is plain gradient descent at a rate of lr / eps.
RATE = 100.0
DESCENT = {"learning_rate": RATE * 1e6, "eps": 1e6, "weight_decay": 0.0, "max_grad_norm": 0.0}
SIZES = (5, 3, 6, 4)
LONGEST = 40  # against prompts of at most 6 tokens: several attention buckets


def make_engine(policy: str, algorithm: dict[str, Any], budget: int = 8192) -> ModelTrainer:
    return policy_trainer(
        make_config(policy, algorithm=algorithm, optimizer=DESCENT, training={"max_tokens_per_microbatch": budget})
    )


def step_and_gradient(engine: ModelTrainer, *calls: list[TrainGroup]) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics of one step, and the gradient [parameters] that its weights moved by."""
    before = weights(engine)
    metrics = comparable(run_step(engine, *calls))
    after = weights(engine)
    return metrics, torch.cat([(before[name].double() - after[name].double()).flatten() for name in before]) / RATE


def run_with(policy: str, groups: list[TrainGroup], **sections: Any) -> dict[str, float]:
    """The metrics of one step of a new engine."""
    return run_step(policy_trainer(make_config(policy, **sections)), groups).metrics


def replies() -> list[TrainGroup]:
    return make_groups(20, SIZES, longest=LONGEST)


def episodes() -> list[TrainGroup]:
    return make_episodes(0)


@pytest.mark.parametrize(
    ("make", "algorithm", "budget"),
    [
        (replies, {"loss": "decoupled"}, 300),
        (replies, {"loss": "decoupled", "aggregation": "seq_mean_token_mean", **LOSS_TERMS}, 300),
        (replies, {"loss": "ppo", **LOSS_TERMS}, 300),
        (replies, {"loss": "ppo", "aggregation": "seq_mean_token_mean"}, 300),
        (episodes, {"loss": "ppo", "aggregation": "episode_mean_token_mean"}, 8192),
        (episodes, {"loss": "ppo", "aggregation": "seq_mean_token_mean"}, 1),
        (episodes, {"loss": "ppo", "aggregation": "token_mean"}, 8192),
        (episodes, {"loss": "ppo", "aggregation": "dr_grpo", "aggregation_norm": 7}, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_a_step_is_that_of_a_plain_loop_over_rows(policy: str, make: Any, algorithm: dict[str, Any], budget: int):
    groups, engine = make(), make_engine(policy, algorithm, budget)
    expected, gradients = Oracle(policy).gradients(groups, engine._config)
    wanted = torch.cat([gradients[name].flatten() for name in weights(engine)])
    metrics, gradient = step_and_gradient(engine, groups)
    assert_metrics({name: metrics[name] for name in expected}, expected)
    assert_close(gradient, wanted, terms=STEP)


def plain_reinforce(path: str, groups: list[TrainGroup]) -> dict[str, float]:
    """Loss and gradient norm of REINFORCE++ under sequence TIS."""
    oracle, returns, logps, factors = Oracle(path), [], [], []
    for row in oracle.rows(groups):
        kept = np.flatnonzero(row.sample.loss_mask)
        if not row.group.valid[row.index] or not len(kept):
            continue
        logp, behaviour = row.logp[kept], row.sample.logprobs.astype(np.float64)[kept]
        reward = -0.1 * (behaviour - row.reference.numpy()[kept])
        reward[-1] += row.group.rewards[row.index]
        returns += [sum(0.9 ** (k - j) * reward[k] for k in range(j, len(kept))) for j in range(len(kept))]
        logps.append(logp)
        factors += [min(math.exp(float(logp.detach().sum()) - behaviour.sum()), CAP)] * len(kept)
    advantages = (np.array(returns) - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8)
    logp, scale = torch.cat(logps), torch.from_numpy(advantages * np.array(factors))
    (-scale * logp).mean().backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in oracle.model.parameters()))
    return {"actor/pg_loss": float(-scale.mean()), "actor/grad_norm": norm}


def test_reinforce_plus_plus_under_sequence_tis_is_that_of_a_plain_loop(policy: str):
    algorithm = {**REINFORCE, "loss": "ppo", "correction": "sequence_tis", "correction_cap": CAP}
    expected = plain_reinforce(policy, make_groups(0))
    for budget in (8192, 1):
        got = run_with(policy, make_groups(0), algorithm=algorithm, training={"max_tokens_per_microbatch": budget})
        assert_metrics({name: got[name] for name in expected}, expected)
        assert 0 < got["correction/weight"] <= CAP
        assert 0 < got["correction/altered"] < 1
        assert "actor/kl_loss" not in got  # the KL is in the rewards, not in the loss


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "aggregation": "seq_mean_token_mean"},
        {"loss": "ppo", "correction": "geometric_mask", "correction_low": 0.7, "correction_high": 1.3},
        {"loss": "sapo", "correction": "icepop", "aggregation": "seq_mean_token_sum"},
        {"loss": "cispo", "correction": "token_tis", "aggregation": "dr_grpo", "aggregation_norm": 16},
        {**REINFORCE, "advantage": "reinforce_plus_plus_baseline"},
        {"advantage": "group_norm", "group_std": "batch"},
        {"loss": "gmpo", "advantage": "opo", "aggregation": "seq_mean_token_mean"},
        {"loss": "gpg", "advantage": "gpg", "truncated": "mask"},
        {"loss": "clip_cov", "loss_options": {"share": 0.3, "low": 0.0}},
        {"loss": "kl_cov", "loss_options": {"share": 0.3}},
        {"loss": "m2po", "loss_options": {"threshold": 0.1}},
        {"loss": "topr"},
        # Of episodes.
        {"aggregation": "episode_mean_token_mean", "turn_discount": 0.9, **LOSS_TERMS},
        {**REINFORCE, "advantage": "reinforce_plus_plus_baseline", "aggregation": "dr_grpo", "turn_discount": 0.5},
        {"group_std": "batch", "aggregation": "seq_mean_token_mean", "loss": "gspo", "turn_discount": 0.9},
        {"advantage": "reinforce_plus_plus", "loss": "ppo", "correction": "sequence_tis", "turn_discount": 0.9},
    ],
    ids=lambda algorithm: "-".join(str(value) for value in algorithm.values()),
)
def test_the_split_over_calls_and_micro_batches_changes_nothing(policy: str, algorithm: dict[str, Any]):
    results = []
    groups = make_episodes(4, turns=True) if "turn_discount" in algorithm else make_groups(1)
    for budget, calls in ((8192, [groups]), (1, [groups[2:], [], groups[:2]])):
        training = {"max_tokens_per_microbatch": budget}
        engine = policy_trainer(make_config(policy, algorithm=algorithm, optimizer=SMOOTH, training=training))
        results.append((comparable(run_step(engine, *calls)), weights(engine)))
    assert_metrics(results[1][0], results[0][0])
    norm = results[0][0]["actor/grad_norm"]
    assert norm > 0
    assert_updated(results[1][1], results[0][1], engine._config.training.optimizer, norm=norm)


@pytest.mark.parametrize(("power", "updates"), [(0.0, {"mini_batch_size": 2}), (0.5, {}), (1.0, {"mini_batch_size": 2})])
def test_the_learning_rate_falls_with_the_age_of_what_is_learned(policy: str, power: float, updates: dict[str, int]):
    training = {"lr_staleness_power": power, "groups_per_step": 4, **updates}
    engine = policy_trainer(make_config(policy, optimizer={"learning_rate": 1e-3}, training=training))
    engine.step = 9
    engine.begin_step(9)
    engine.accumulate(make_groups(1))
    found = engine.apply().metrics
    assert found["staleness/token_mean"] > 1
    assert found["actor/lr"] == pytest.approx(1e-3 / (1 + found["staleness/token_mean"]) ** power)


def masked(group: TrainGroup, which: Callable[[int], bool]) -> TrainGroup:
    """`group` without training on the samples `which` says; their rewards count all the same."""
    payload = types.decode(GroupPayload, group.payload)
    samples = [
        replace(sample, loss_mask=0 * sample.loss_mask, logprobs=0 * sample.logprobs) if which(index) else sample
        for index, sample in enumerate(payload.samples)
    ]
    return replace(group, payload=types.encode(GroupPayload.of(payload.group_id, payload.prompt, samples)))


@pytest.mark.parametrize("budget", [8192, 1])
def test_dr_grpo_leaves_the_others_as_they_are_where_a_sample_is_masked(policy: str, budget: int):
    """As in TRL and the authors' code: what is divided by does not depend on what is masked, so that parts add up."""
    sections = {
        "algorithm": {"loss": "ppo", "aggregation": "dr_grpo", "aggregation_norm": 1},
        "training": {"max_tokens_per_microbatch": budget},
    }
    chosen = (lambda _: False), (lambda index: index == 0), (lambda index: index != 0)
    each = ([masked(make_groups(12)[2], which)] for which in chosen)
    whole, others, one = (run_with(policy, groups, **sections)["actor/pg_loss"] for groups in each)
    assert abs(one) > 0.1
    assert_close(others + one, whole, terms=STEP, scale=1.0)


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        ({}, "group_std", "none"),
        ({}, "advantage_options", {"ddof": 0}),
        ({}, "advantage_options", {"eps": 0.5}),
        ({"advantage": "reinforce_plus_plus"}, "gamma", 0.5),
        ({}, "overlong_buffer", 0.5),
        ({"overlong_buffer": 0.5}, "overlong_penalty", 0.1),
        ({}, "missing_eos_penalty", 1.0),
        ({}, "truncated", "mask"),
        ({"aggregation": "dr_grpo"}, "aggregation_norm", 5),
        ({"loss": "ppo"}, "clip_low", 0.5),
        ({"loss": "ppo"}, "clip_high", 20.0),
        ({"loss": "ppo"}, "dual_clip", 1.1),
        ({"loss": "sapo"}, "loss_options", {"tau_positive": 2.0}),
        ({"loss": "sapo"}, "loss_options", {"tau_negative": 2.0}),
        ({"loss": "clip_cov", "loss_options": {"low": 0.0}}, "loss_options", {"low": 0.0, "share": 0.5}),
        ({"loss": "clip_cov", "loss_options": {"share": 1.0}}, "loss_options", {"share": 1.0, "low": 0.0}),
        (
            {"loss": "clip_cov", "loss_options": {"share": 1.0, "low": 0.0}},
            *("loss_options", {"share": 1.0, "low": 0.0, "high": 0.2}),
        ),
        ({"loss": "kl_cov"}, "loss_options", {"share": 0.5}),
        ({"loss": "kl_cov", "loss_options": {"share": 0.5}}, "loss_options", {"share": 0.5, "kl": 3.0}),
        ({"loss": "m2po"}, "loss_options", {"threshold": 10.0}),
        ({}, "loss_options", {"weight_cap": 0.5}),
        ({}, "loss_options", {"weight_over": "drop"}),
        ({"loss": "ppo"}, "correction", "icepop"),
        ({"loss": "ppo", "correction": "token_tis"}, "correction_cap", 0.5),
        ({"loss": "ppo", "correction": "icepop"}, "correction_low", 0.9),
        ({"loss": "ppo", "correction": "icepop"}, "correction_high", 1.1),
        ({"kl_coefficient": 0.1}, "kl", "k2"),
        ({}, "kl_coefficient", 0.1),
        ({"kl_coefficient": 0.1}, "kl_placement", "reward"),
        ({"kl_coefficient": 0.1}, "kl_importance_weighted", True),
        ({}, "entropy_coefficient", 0.1),
    ],
    ids=str,
)
def test_every_option_changes_the_gradient(policy: str, algorithm: dict[str, Any], key: str, value: Any):
    norms = [norm_of(policy, json.dumps(section, sort_keys=True)) for section in (algorithm, {**algorithm, key: value})]
    assert norms[0] != pytest.approx(norms[1], rel=1e-4)


@cache
def norm_of(policy: str, algorithm: str) -> float:
    """Of the gradient, some of whose samples were cut off."""
    metrics = run_with(policy, cut_off(make_groups(12)), algorithm=json.loads(algorithm), sampling={"max_new_tokens": 12})
    return metrics["actor/grad_norm"]


class TestHeldGroups:
    def test_nothing_is_computed_before_apply_and_nothing_is_left_after(self, policy: str):
        engine = policy_trainer(make_config(policy, algorithm=REINFORCE))
        once = run_step(engine, make_groups(2)).metrics
        assert once["response_length/mean"] > 0
        nothing = run_step(engine).metrics
        assert nothing["actor/grad_norm"] == 0
        assert "response_length/mean" not in nothing

    def test_a_new_step_forgets_what_was_held(self, policy: str):
        left, right = (policy_trainer(make_config(policy, algorithm=REINFORCE)) for _ in range(2))
        left.begin_step(0)
        left.accumulate(make_groups(5))
        assert run_step(left, make_groups(2)).metrics == run_step(right, make_groups(2)).metrics


class TestKl:
    @pytest.mark.parametrize("placement", ["loss", "reward"])
    def test_an_adaptive_coefficient_follows_the_divergence_and_survives_a_checkpoint(
        self, policy: str, tmp_path: Path, placement: str
    ):
        groups = make_groups(6)
        samples = sum(len(group.rewards) for group in groups)
        adaptive = {"kl_coefficient": 0.1, "kl_placement": placement, "kl_target": 1e-3, "kl_horizon": 100}
        engine = policy_trainer(make_config(policy, algorithm=adaptive))
        used = [run_step(engine, groups).metrics["actor/kl_coefficient"] for _ in range(3)]
        growth = 1 + 0.2 * samples / 100  # the divergence of random policies is far beyond the target
        assert used == pytest.approx([0.1, 0.1 * growth, 0.1 * growth**2])
        engine.save(str(tmp_path))
        resumed = policy_trainer(make_config(policy, algorithm=adaptive))
        resumed.load(str(tmp_path))
        assert run_step(resumed, groups).metrics == run_step(engine, groups).metrics

    def test_a_fixed_coefficient_is_the_configurations(self, policy: str, tmp_path: Path):
        engine = policy_trainer(make_config(policy, algorithm={"kl_coefficient": 0.1}))
        engine.save(str(tmp_path))
        other = policy_trainer(make_config(policy, algorithm={"kl_coefficient": 0.2}))
        other.load(str(tmp_path))
        assert run_step(other, make_groups(0)).metrics["actor/kl_coefficient"] == 0.2


def test_length_penalties_are_added_to_the_rewards(policy: str):
    groups, shaped = make_groups(7), make_groups(7)
    sampling = {"max_new_tokens": 12}
    for group, other in zip(groups, shaped, strict=True):
        payload = types.decode(GroupPayload, group.payload)
        payload.finish_reasons[0] = "length"
        group.payload = other.payload = types.encode(payload)
        lengths = np.array([len(sample.tokens) for sample in payload.samples])
        other.rewards = other.rewards + 0.1 * np.clip((6 - lengths) / 6, -1, 0).astype(np.float32)
        other.rewards[0] -= 0.5
    penalties = {"overlong_buffer": 0.5, "overlong_penalty": 0.1, "missing_eos_penalty": 0.5}
    got = run_with(policy, groups, algorithm=penalties, sampling=sampling)
    expected = run_with(policy, shaped, sampling=sampling)
    names = ("actor/pg_loss", "actor/grad_norm")
    assert_metrics({name: got[name] for name in names}, {name: expected[name] for name in names})
    assert got["score/length_penalty"] < 0
    assert got["score/mean"] != pytest.approx(expected["score/mean"])  # scores stay those of the rules


def preset_config(folder: Path, policy: str, **algorithm: Any) -> Any:
    path = folder / "run.yaml"
    raw = {
        "run": {"name": "a"},
        "model": {"path": policy},
        "sampling": {"max_new_tokens": 12},
        "algorithm": algorithm,
        "training": {"optimizer": {"learning_rate": 1e-3}},
    }
    path.write_text(yaml.safe_dump(raw))
    return load(path)


def test_presets_give_distinct_losses_on_one_batch(policy: str, tmp_path: Path):
    names = preset_names("algorithm.preset")
    assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus"} <= set(names)
    groups = make_groups(8)
    losses, norms = [], []
    for name in names:
        metrics = run_step(policy_trainer(preset_config(tmp_path, policy, preset=name)), groups).metrics
        losses.append(metrics["actor/pg_loss"])
        norms.append(metrics["actor/grad_norm"])
    for values in (losses, norms):
        ordered = np.sort(values)
        assert np.isfinite(ordered).all()
        assert (np.diff(ordered) > 1e-4 * np.abs(ordered[1:])).all(), dict(zip(names, values, strict=True))


def test_the_guides_example_trains(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The code and the YAML of docs/guides/algorithms.md, as a user would copy them."""
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for language, block in blocks:
        file = re.match(r"# (\S+\.py)\n", block)
        if language == "python" and file:
            path = tmp_path / file.group(1)
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
    sections = [yaml.safe_load(block).get("algorithm", {}) for language, block in blocks if language == "yaml"]
    (algorithm,) = [section for section in sections if ".py:" in section.get("loss", "")]
    metrics = run_step(policy_trainer(preset_config(tmp_path, policy, **algorithm)), make_groups(9)).metrics
    plain = run_step(policy_trainer(preset_config(tmp_path, policy)), make_groups(9)).metrics
    assert metrics["actor/ratio"] == pytest.approx(1.0)  # taken against the proximal policy, as there is a correction
    assert metrics["actor/pg_loss"] != pytest.approx(plain["actor/pg_loss"])


def test_an_option_of_a_loss_reaches_the_gradient(policy: str, tmp_path: Path):
    """Twice the loss has twice the gradient, exactly: scaling by a power of two rounds nothing."""
    path = tmp_path / "own.py"
    path.write_text(
        "from sluice import LossOutputs, policy_loss\n"
        "@policy_loss('scaled_by_option', zero_without_advantage=True)\n"
        "def scaled(inputs, options, scale):\n"
        "    return LossOutputs(-scale * inputs.logp * inputs.advantages)\n"
    )
    own = {"loss": f"{path}:scaled_by_option", "correction": "none", "kl_coefficient": 0.0}
    norms = [run_with(policy, make_groups(9), algorithm={**own, "loss_options": {"scale": scale}}) for scale in (1.0, 2.0)]
    assert norms[1]["actor/grad_norm"] == 2 * norms[0]["actor/grad_norm"] > 0


def cut_off(groups: list[TrainGroup]) -> list[TrainGroup]:
    """The first sample of each group ended by length."""
    for group in groups:
        payload = types.decode(GroupPayload, group.payload)
        payload.finish_reasons[0] = "length"
        group.payload = types.encode(payload)
    return groups


@pytest.mark.parametrize(
    ("advantage", "aggregation"),
    [("reinforce_plus_plus", "token_mean"), ("group_norm", "seq_mean_token_mean"), ("group_norm", "dr_grpo")],
)
def test_truncated_samples_are_trained_as_if_they_had_no_tokens(policy: str, advantage: str, aggregation: str):
    """Their rewards count in the group's statistics, and they are counted."""
    algorithm = {"advantage": advantage, "aggregation": aggregation, "kl_coefficient": 0.1}
    trained, left_out = (
        policy_trainer(make_config(policy, algorithm=algorithm | more)) for more in ({}, {"truncated": "mask"})
    )
    expected = run_step(trained, [masked(group, lambda index: index == 0) for group in cut_off(make_groups(13))]).metrics
    got = run_step(left_out, cut_off(make_groups(13))).metrics
    assert got.pop("response_length/masked") == 3
    for name in ("episode/turns", "episode/environment_tokens"):  # what is masked by hand is no turn of the model's
        got.pop(name, None), expected.pop(name, None)
    assert got == expected
    assert_same(weights(left_out), weights(trained))
    assert "response_length/masked" not in expected


def test_an_episode_is_truncated_as_its_last_row_is(policy: str):
    rows = train_rows.rows_of(train_rows.check_groups(make_episodes(3), VOCAB, Needs()), Needs())
    last = {int(episode): bool(cut) for episode, cut in zip(rows.episode, rows.truncated, strict=True)}
    engine = policy_trainer(make_config(policy, algorithm={"truncated": "mask"}))
    counted = sum(last[int(episode)] for episode in rows.episode[rows.leads & rows.valid])
    assert run_step(engine, make_episodes(3)).metrics["response_length/masked"] == counted > 0


# ------------------------------------------------------------------------------------------------------------- episodes


def branched(groups: list[TrainGroup]) -> list[TrainGroup]:
    """The same replies, each trained in three branches: of the first all but two thirds of the tokens, and so on."""
    found = []
    for group in groups:
        payload = types.decode(GroupPayload, group.payload)
        rows = [_third(sample, part) for sample in payload.samples for part in range(3)]
        whole = GroupPayload.of(payload.group_id, payload.prompt, rows, [3] * payload.n)
        found.append(replace(group, payload=types.encode(whole)))
    return found


def _third(sample: Sample, part: int) -> Sample:
    mask = sample.loss_mask * (np.arange(len(sample.tokens)) % 3 == part).astype(np.uint8)
    return replace(sample, loss_mask=mask, logprobs=sample.logprobs * mask)


@pytest.mark.parametrize(
    ("aggregation", "advantage"),
    [
        ("episode_mean_token_mean", "group_norm"),
        ("episode_mean_token_mean", "reinforce_plus_plus_baseline"),
        ("dr_grpo", "rloo"),
        ("token_mean", "reinforce_plus_plus_baseline"),
    ],
)
def test_more_branches_do_not_weigh_more(policy: str, aggregation: str, advantage: str):
    """The tokens of a reply, in one row or shared out over three: the same gradient, whoever has more branches."""
    algorithm = {"loss": "ppo", "aggregation": aggregation, "advantage": advantage}
    results = []
    for groups in (make_groups(2), [*branched(make_groups(2)[:1]), *make_groups(2)[1:]]):
        engine = policy_trainer(make_config(policy, algorithm=algorithm, optimizer=SMOOTH))
        metrics = run_step(engine, groups).metrics
        results.append(
            ({name: metrics[name] for name in ("actor/pg_loss", "actor/grad_norm", "score/mean", "samples")}, weights(engine))
        )
    assert_metrics(results[1][0], results[0][0])
    assert_updated(results[1][1], results[0][1], engine._config.training.optimizer, norm=results[0][0]["actor/grad_norm"])


def test_what_environments_wrote_has_no_say(policy: str):
    """Reference, values, log-probabilities and versions at tokens that are not trained are whatever they are."""
    groups = make_episodes(5, turns=True)
    others = [_spoiled(group) for group in groups]
    algorithm = {"kl_coefficient": 0.1, "loss": "decoupled", "correction": "none", "aggregation": "episode_mean_token_mean"}
    engines = [policy_trainer(make_config(policy, algorithm=algorithm)) for _ in range(2)]
    metrics = [run_step(engine, each).metrics for engine, each in zip(engines, (groups, others), strict=True)]
    assert metrics[0] == metrics[1]
    assert_same(weights(engines[0]), weights(engines[1]))


def _spoiled(group: TrainGroup) -> TrainGroup:
    payload, reference = types.decode(GroupPayload, group.payload), types.decode(Logprobs, group.reference)
    given = payload.loss_mask.expand() == 0
    versions = np.where(given, payload.versions.expand() + 7, payload.versions.expand())
    values = np.where(given, np.float32(-30), reference.values)
    changed = replace(payload, versions=Runs.of(versions))
    return replace(group, payload=types.encode(changed), reference=types.encode(replace(reference, values=values)))


def test_the_critic_learns_along_each_branch_as_if_gaps_were_not_there(policy: str):
    """Returns of GAE by its recursion over a row's trained tokens, the episode's reward at the last and turns' at their own."""
    groups, gamma, lam, returns = make_episodes(8, turns=True), 0.9, 0.7, []
    for group in groups:
        payload, values = (
            types.decode(GroupPayload, group.payload),
            types.decode(Values, group.values).values.astype(np.float64),
        )
        owner, begin = np.repeat(np.arange(payload.n), payload.rows), 0
        for row, sample in enumerate(payload.samples):
            own, begin = values[begin : begin + len(sample.tokens)], begin + len(sample.tokens)
            if not group.valid[owner[row]]:
                continue
            earned = {turn.token: turn.value for turn in payload.turn_rewards if turn.row == row}
            following, advantage = 0.0, 0.0
            for nth, token in enumerate(np.flatnonzero(sample.loss_mask)[::-1].tolist()):
                reward = earned.get(token, 0.0) + (float(group.rewards[owner[row]]) if nth == 0 else 0.0)
                advantage = reward + gamma * following - own[token] + gamma * lam * advantage
                following = own[token]
                returns.append(advantage + own[token])
    algorithm = {"advantage": "gae", "gamma": gamma, "gae_lambda": lam}
    engine = critic_trainer(replace(make_config(policy, algorithm=algorithm), critic=Critic()))
    got = run_step(engine, groups).metrics
    for name, expected in (("mean", np.mean(returns)), ("max", max(returns)), ("min", min(returns))):
        assert_close(got[f"critic/returns/{name}"], expected, terms=len(returns), scale=max(map(abs, returns)), what=name)


def test_metrics_are_of_episodes(policy: str):
    groups = make_episodes(6)
    got = run_step(policy_trainer(make_config(policy)), groups).metrics
    payloads = [types.decode(GroupPayload, group.payload) for group in groups]
    rows, turns, given, episodes = 0, 0, 0, 0
    for group, payload in zip(groups, payloads, strict=True):
        samples = iter(payload.samples)
        for valid, branches in zip(group.valid, payload.rows, strict=True):
            own = [next(samples) for _ in range(branches)]
            if valid:
                episodes, rows = episodes + 1, rows + len(own)
                turns += sum("".join(map(str, row.loss_mask)).replace("0", " ").split().__len__() for row in own)
                given += sum(int((row.loss_mask == 0).sum()) for row in own)
    assert got["episode/rows"] == pytest.approx(rows / episodes)
    assert got["episode/turns"] == pytest.approx(turns / episodes)
    assert got["episode/environment_tokens"] == pytest.approx(given / episodes)
    assert got["samples"] == sum(payload.n for payload in payloads)
    scores = np.concatenate([group.rewards[group.valid == 1] for group in groups])
    assert got["score/mean"] == pytest.approx(scores.mean(dtype=np.float64))
    assert got["response_length/mean"] == pytest.approx(np.mean(np.concatenate([payload.lengths for payload in payloads])))


def test_replies_have_no_metrics_of_episodes(policy: str):
    groups = [
        group for group in make_groups(1, longest=4) if group.group_id != 1
    ]  # without gaps, and without what is not trained
    assert not [name for name in run_step(policy_trainer(make_config(policy)), groups).metrics if name.startswith("episode/")]


def test_the_kl_coefficient_adapts_by_episodes(policy: str):
    """β ← β (1 + clip(kl / target - 1, ±0.2) · n / horizon), n the episodes of the step."""
    algorithm = {"kl_coefficient": 0.1, "kl_target": 1e-6, "kl_horizon": 100}
    engine, groups = policy_trainer(make_config(policy, algorithm=algorithm)), make_episodes(1)
    run_step(engine, groups)
    episodes = sum(types.decode(GroupPayload, group.payload).n for group in groups)
    assert_close(engine.objective.kl_control.coefficient, 0.1 * (1 + 0.2 * episodes / 100), terms=STEP)


# -------------------------------------------------------------------------------------------------------------- packing

# Adam's first step is lr · g / (|g| + eps): with a large eps it is plain gradient descent at a rate of lr / eps.


# ---------------------------------------------------------------------------------------------- against padded rows


# ---------------------------------------------------------------------------------------------- no sequence sees another


def mute(group: TrainGroup, samples: range) -> None:
    """Behaviour log-probabilities so far from any policy's that PPO's clip decides every token of `samples`: whatever their
    tokens, the losses are constants and the gradients 0, and yet the samples run packed with the others."""
    payload = types.decode(GroupPayload, group.payload)
    mean = group.rewards[group.valid == 1].mean()
    replies = payload.samples
    for index in samples:
        far = -40.0 if group.rewards[index] > mean else 40.0
        replies[index] = replace(replies[index], logprobs=np.float32(far) * replies[index].loss_mask)
    group.payload = types.encode(GroupPayload.of(payload.group_id, payload.prompt, replies))


def alter(group: TrainGroup, samples: range, *, prompt: bool) -> None:
    """Other tokens in the replies of `samples`, and in the prompt."""
    payload = types.decode(GroupPayload, group.payload)
    changed = (payload.prompt + 7) % VOCAB if prompt else payload.prompt
    replies = payload.samples
    for index in samples:
        replies[index] = replace(replies[index], tokens=(replies[index].tokens + 7) % VOCAB)
    group.payload = types.encode(GroupPayload.of(payload.group_id, changed, replies))


@pytest.mark.parametrize(("samples", "prompt"), [(range(2, 3), False), (range(SIZES[0]), True)], ids=["reply", "group"])
def test_other_tokens_in_one_sequence_reach_no_other(policy: str, samples: range, prompt: bool):
    """Bit for bit: the gradient of the others, those with the same prompt included. The altered group comes first because the
    padding of attention rows points to the first packed token."""
    results = []
    for altered in (False, True):
        groups = make_groups(21, SIZES, longest=LONGEST)
        mute(groups[0], samples)
        if altered:
            alter(groups[0], samples, prompt=prompt)
        results.append(step_and_gradient(make_engine(policy, {"loss": "ppo"}), groups))
    (before, gradient), (after, other_gradient) = results
    assert before["actor/entropy"] != after["actor/entropy"]  # the altered sequences themselves did change
    assert before["actor/grad_norm"] > 0
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert before[name] == after[name], name
    assert torch.equal(gradient, other_gradient)


# ---------------------------------------------------------------------------------------------- any way of cutting a step


def reordered(group: TrainGroup, order: list[int]) -> TrainGroup:
    """`group` with its samples in another order."""
    payload = types.decode(GroupPayload, group.payload)
    ends = np.cumsum([len(sample.tokens) for sample in payload.samples])
    references = np.split(types.decode(Logprobs, group.reference).values, ends[:-1])
    samples = payload.samples
    values = np.concatenate([references[i] for i in order])
    return replace(
        group,
        payload=types.encode(GroupPayload.of(payload.group_id, payload.prompt, [samples[i] for i in order])),
        rewards=group.rewards[order],
        valid=group.valid[order],
        reference=types.encode(Logprobs(group_id=group.group_id, values=values)),
    )


CUT_ALGORITHMS = {
    "decoupled": {"loss": "decoupled", **LOSS_TERMS},
    "ppo": {"loss": "ppo", "aggregation": "seq_mean_token_mean", **LOSS_TERMS},
    "whole batch": {"loss": "ppo", "advantage": "reinforce_plus_plus_baseline", "entropy_coefficient": 0.01},
}


@pytest.fixture(scope="module", params=CUT_ALGORITHMS.values(), ids=list(CUT_ALGORITHMS))
def uncut(request: pytest.FixtureRequest, policy: str) -> tuple[dict[str, Any], dict[str, float], torch.Tensor]:
    """An algorithm, and a step of it in one call and one micro-batch."""
    groups = make_groups(23, SIZES, longest=LONGEST)
    return request.param, *step_and_gradient(make_engine(policy, request.param, budget=1 << 20), groups)


@settings(max_examples=5)
@given(data=st.data())
def test_cuts_and_orders_change_nothing(
    policy: str, uncut: tuple[dict[str, Any], dict[str, float], torch.Tensor], data: st.DataObject
):
    algorithm, expected, wanted = uncut
    groups = [
        reordered(group, data.draw(st.permutations(range(size)), label=f"samples of {group.group_id}"))
        for group, size in zip(make_groups(23, SIZES, longest=LONGEST), SIZES, strict=True)
    ]
    groups = data.draw(st.permutations(groups).map(list), label="groups")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(groups)), max_size=4), label="cuts"))
    calls = [groups[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(groups)], strict=True)]
    budget = data.draw(st.sampled_from([1, 60, 150, 400, 1 << 20]), label="budget")
    metrics, gradient = step_and_gradient(make_engine(policy, algorithm, budget), *calls)
    assert_metrics(metrics, expected)
    assert_close(gradient, wanted, terms=STEP)


def test_padding_waste_is_what_attention_rows_hold_beyond_their_tokens(policy: str):
    """Rows of prompt and reply less its last token, in buckets whose longest is at most 1.5 times the shortest."""
    (group,) = make_groups(0, (4,))
    prompt, lengths = 4, (5, 9, 7, 21)  # rows of 8, 10 and 12 tokens side by side, and one of 24
    samples = [
        Sample(
            tokens=np.arange(length, dtype=np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=np.full(length, -4.0, np.float32),
            versions=np.zeros(length, np.int64),
            finish_reason="stop",
        )
        for length in lengths
    ]
    payload = GroupPayload.of(group.group_id, np.arange(prompt, dtype=np.int32), samples)
    group = replace(group, payload=types.encode(payload), valid=np.ones(4, np.uint8))
    metrics = run_step(make_engine(policy, {}), [group]).metrics
    assert metrics["padding_waste"] == pytest.approx((4 + 2) / (3 * 12 + 24))
