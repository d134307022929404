"""The configured algorithm in the training engine: corrections, KL in the reward, batch-wide advantages, presets, one's own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from msgspec import structs

from runtime import codec
from runtime.config.loading import load, preset_names
from runtime.errors import InvalidMessage
from runtime.trainer import rows as train_rows
from runtime.trainer.rows import Needs
from runtime.trainer.step import policy_trainer
from runtime.types import GroupPayload, Logprobs, TrainGroup
from tests.closeness import STEP, assert_close
from tests.unit.training_cases import VOCAB, make_config, make_episodes, make_groups, make_policy
from tests.unit.training_steps import assert_metrics, assert_same, assert_updated, comparable, run_step, weights

pytestmark = pytest.mark.numeric

SMOOTH = {"eps": 1e-2, "max_grad_norm": 0.0}
REINFORCE = {"advantage": "reinforce_plus_plus", "gamma": 0.9, "kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.1}
CAP = 0.05  # below the weights of some samples of a random policy
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "algorithms.md"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy(tmp_path_factory.mktemp("policy"))


def plain_reinforce(path: str, groups: list[TrainGroup], cap: float) -> tuple[float, float]:
    """Loss and gradient norm of REINFORCE++ under sequence TIS, one sample a forward pass, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    returns, logps, sample_weights = [], [], []
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        reference = codec.decode(Logprobs, group.reference).values.astype(np.float64)
        for i, sample in enumerate(payload.samples):
            own, reference = reference[: len(sample.tokens)], reference[len(sample.tokens) :]
            kept = np.flatnonzero(sample.loss_mask)
            if not group.valid[i] or not len(kept):
                continue
            ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
            logits = model(ids[None]).logits[0, len(payload.prompt) - 1 : -1]
            logp = torch.log_softmax(logits, -1)[torch.arange(len(sample.tokens)), ids[len(payload.prompt) :]][kept]
            behaviour = sample.logprobs.astype(np.float64)[kept]
            reward = -0.1 * (behaviour - own[kept])
            reward[-1] += group.rewards[i]
            returns += [sum(0.9 ** (k - j) * reward[k] for k in range(j, len(kept))) for j in range(len(kept))]
            logps.append(logp)
            weight = min(math.exp(float((logp.detach() - torch.from_numpy(behaviour)).sum())), cap)
            sample_weights += [weight] * len(kept)
    advantages = (np.array(returns) - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8)
    logp, scale = torch.cat(logps), torch.from_numpy(advantages * np.array(sample_weights))
    (-scale * logp).mean().backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    return float(-scale.mean()), norm


@pytest.mark.parametrize("budget", [8192, 1])
def test_reinforce_plus_plus_under_sequence_tis_is_that_of_a_plain_loop(policy: str, budget: int):
    algorithm = {**REINFORCE, "loss": "ppo", "correction": "sequence_tis", "correction_cap": CAP}
    training = {"max_tokens_per_microbatch": budget}
    groups = make_groups(0)
    loss, norm = plain_reinforce(policy, groups, CAP)
    got = run_step(policy_trainer(make_config(policy, algorithm=algorithm, training=training)), groups).metrics
    found = {name: got[name] for name in ("actor/pg_loss", "actor/grad_norm")}
    assert_metrics(found, {"actor/pg_loss": loss, "actor/grad_norm": norm})
    assert 0 < got["correction/weight"] <= CAP
    assert 0 < got["correction/altered"] < 1
    assert "actor/kl_loss" not in got  # the KL is in the rewards, not in the loss


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "aggregation": "seq_mean_token_mean"},
        {"loss": "ppo", "correction": "geometric_mask", "correction_low": 0.7, "correction_high": 1.3},
        {"loss": "sapo", "correction": "icepop"},
        {"loss": "cispo", "correction": "token_tis", "aggregation": "dr_grpo", "aggregation_norm": 16},
        {**REINFORCE, "advantage": "reinforce_plus_plus_baseline"},
        {"advantage": "group_norm", "group_std": "batch"},
        {"loss": "gmpo", "advantage": "opo", "aggregation": "seq_mean_token_mean"},
        {"loss": "gpg", "advantage": "gpg", "truncated": "mask"},
        {"loss": "clip_cov", "covariance_share": 0.3, "covariance_low": 0.0},
        {"loss": "kl_cov", "covariance_share": 0.3},
        {"loss": "m2po", "m2_threshold": 0.1},
        {"loss": "topr"},
    ],
    ids=lambda algorithm: "-".join(str(value) for value in algorithm.values()),
)
def test_the_split_over_calls_and_micro_batches_changes_nothing(policy: str, algorithm: dict[str, Any]):
    groups = make_groups(1)
    results = []
    for budget, cuts in ((8192, [groups]), (1, [groups[2:], [], groups[:2]])):
        training = {"max_tokens_per_microbatch": budget}
        engine = policy_trainer(make_config(policy, algorithm=algorithm, optimizer=SMOOTH, training=training))
        results.append((comparable(run_step(engine, *cuts)), weights(engine)))
    assert_metrics(results[1][0], results[0][0])
    norm = results[0][0]["actor/grad_norm"]
    assert norm > 0
    assert_updated(results[1][1], results[0][1], engine._config.training.optimizer, norm=norm)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("updates", [{}, {"mini_batch_size": 2}])
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
    payload = codec.decode(GroupPayload, group.payload)
    samples = [
        structs.replace(sample, loss_mask=0 * sample.loss_mask, logprobs=0 * sample.logprobs) if which(index) else sample
        for index, sample in enumerate(payload.samples)
    ]
    return structs.replace(group, payload=codec.encode(GroupPayload.of(payload.group_id, payload.prompt, samples)))


@pytest.mark.parametrize("budget", [8192, 1])
def test_dr_grpo_leaves_the_others_as_they_are_where_a_sample_is_masked(policy: str, budget: int):
    """As in TRL and the authors' code: what is divided by does not depend on what is masked, so that parts add up."""
    group, losses = make_groups(12)[2], []
    for which in (lambda _: False, lambda index: index == 0, lambda index: index != 0):
        algorithm = {"loss": "ppo", "aggregation": "dr_grpo", "aggregation_norm": 1}
        engine = policy_trainer(make_config(policy, algorithm=algorithm, training={"max_tokens_per_microbatch": budget}))
        losses.append(run_step(engine, [masked(group, which)]).metrics["actor/pg_loss"])
    whole, others, one = losses
    assert abs(one) > 0.1
    assert_close(others + one, whole, terms=STEP, scale=1.0)


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        ({}, "group_std", "none"),
        ({}, "group_std_ddof", 0),
        ({}, "group_std_eps", 0.5),
        ({"advantage": "reinforce_plus_plus"}, "gamma", 0.5),
        ({}, "overlong_buffer", 0.5),
        ({"overlong_buffer": 0.5}, "overlong_penalty", 0.1),
        ({}, "missing_eos_penalty", 1.0),
        ({}, "truncated", "mask"),
        ({"aggregation": "dr_grpo"}, "aggregation_norm", 5),
        ({"loss": "ppo"}, "clip_low", 0.5),
        ({"loss": "ppo"}, "clip_high", 20.0),
        ({"loss": "ppo"}, "dual_clip", 1.1),
        ({"loss": "sapo"}, "sapo_tau_positive", 2.0),
        ({"loss": "sapo"}, "sapo_tau_negative", 2.0),
        ({"loss": "clip_cov", "covariance_low": 0.0}, "covariance_share", 0.5),
        ({"loss": "clip_cov", "covariance_share": 1.0}, "covariance_low", 0.0),
        ({"loss": "clip_cov", "covariance_share": 1.0, "covariance_low": 0.0}, "covariance_high", 0.2),
        ({"loss": "kl_cov"}, "covariance_share", 0.5),
        ({"loss": "kl_cov", "covariance_share": 0.5}, "covariance_kl", 3.0),
        ({"loss": "m2po"}, "m2_threshold", 10.0),
        ({}, "behaviour_weight_cap", 0.5),
        ({}, "behaviour_weight_over", "drop"),
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
    groups = make_groups(12)
    payload = codec.decode(GroupPayload, groups[2].payload)
    payload.finish_reasons[0] = "length"
    groups[2].payload = codec.encode(payload)
    norms = []
    for section in (algorithm, {**algorithm, key: value}):
        config = make_config(policy, algorithm=section, sampling={"max_new_tokens": 12})
        norms.append(run_step(policy_trainer(config), groups).metrics["actor/grad_norm"])
    assert norms[0] != pytest.approx(norms[1], rel=1e-4)


class TestHeldGroups:
    def test_joined_parts_are_the_whole(self):
        groups = make_groups(3)
        whole = train_rows.decode_groups(groups, VOCAB, Needs(reference=True))
        parts = [train_rows.decode_groups(part, VOCAB, Needs(reference=True)) for part in (groups[:1], [], groups[1:])]
        joined = train_rows.join(parts)
        for name in whole.__dataclass_fields__:
            left, right = getattr(joined, name), getattr(whole, name)
            if right is None:
                assert left is None, name
                continue
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)

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

    def test_malformed_groups_are_refused_when_they_come(self, policy: str):
        engine = policy_trainer(make_config(policy, algorithm=REINFORCE))
        groups = make_groups(0)
        groups[0].reference = None
        engine.begin_step(0)
        with pytest.raises(InvalidMessage, match="group 0: has no reference"):
            engine.accumulate(groups)
        engine.accumulate(make_groups(0))
        clean = run_step(policy_trainer(make_config(policy, algorithm=REINFORCE)), make_groups(0))
        assert engine.apply().metrics == clean.metrics


class TestKl:
    def test_importance_weighting_reaches_the_loss(self, policy: str):
        groups = make_groups(4)
        plain, weighted = (
            run_step(policy_trainer(make_config(policy, algorithm={"kl_coefficient": 0.1, **more})), groups).metrics
            for more in ({}, {"kl_importance_weighted": True})
        )
        assert plain["actor/kl_loss"] != pytest.approx(weighted["actor/kl_loss"], rel=1e-3)

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
        payload = codec.decode(GroupPayload, group.payload)
        payload.finish_reasons[0] = "length"
        group.payload = other.payload = codec.encode(payload)
        lengths = np.array([len(sample.tokens) for sample in payload.samples])
        other.rewards = other.rewards + 0.1 * np.clip((6 - lengths) / 6, -1, 0).astype(np.float32)
        other.rewards[0] -= 0.5
    penalties = {"overlong_buffer": 0.5, "overlong_penalty": 0.1, "missing_eos_penalty": 0.5}
    penalised = make_config(policy, algorithm=penalties, sampling=sampling)
    got = run_step(policy_trainer(penalised), groups).metrics
    expected = run_step(policy_trainer(make_config(policy, sampling=sampling)), shaped).metrics
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
    norms = [
        run_step(
            policy_trainer(make_config(policy, algorithm={**own, "loss_options": {"scale": scale}})), make_groups(9)
        ).metrics
        for scale in (1.0, 2.0)
    ]
    assert norms[1]["actor/grad_norm"] == 2 * norms[0]["actor/grad_norm"] > 0


def cut_off(groups: list[TrainGroup]) -> list[TrainGroup]:
    """The first sample of each group ended by length."""
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        payload.finish_reasons[0] = "length"
        group.payload = codec.encode(payload)
    return groups


@pytest.mark.parametrize("advantage", ["group_norm", "reinforce_plus_plus"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "dr_grpo"])
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
    rows = train_rows.decode_groups(make_episodes(3), VOCAB, Needs())
    last = {int(episode): bool(cut) for episode, cut in zip(rows.episode, rows.truncated, strict=True)}
    engine = policy_trainer(make_config(policy, algorithm={"truncated": "mask"}))
    counted = sum(last[int(episode)] for episode in rows.episode[rows.leads & rows.valid])
    assert run_step(engine, make_episodes(3)).metrics["response_length/masked"] == counted > 0
