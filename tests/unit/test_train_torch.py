"""A step of the training engine on one rank, against a plain loop over samples with a stock Hugging Face model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import codec
from runtime.config import Config, Trainer
from runtime.errors import UserError
from runtime.models import passes
from runtime.trainer import objective
from runtime.trainer.step import policy_trainer
from runtime.types import GroupPayload, Logprobs, PolicyVersion, TrainGroup
from tests.closeness import LOGITS, STEP, assert_close, forward_terms
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import VOCAB, make_config, make_groups, make_policy
from tests.unit.training_steps import LOSS_TERMS, assert_metrics, assert_same, assert_updated, comparable, run_step, weights

pytestmark = pytest.mark.numeric


class Oracle:
    """One step of GRPO written out: one sample a forward pass, stock attention, float64."""

    def __init__(self, path: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
        for module in self.model.modules():
            if type(module).__name__ in (
                "DeepseekV3TopkRouter",
                "Glm4MoeTopkRouter",
            ):  # which computes in float32 whatever the model is of
                module.register_forward_hook(lambda _module, _inputs, found: (found[0], found[1].double()))

    def gradients(self, groups: list[TrainGroup], config: Config) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        algorithm, temperature = config.algorithm, config.sampling.temperature
        policy, divergence, entropies = [], [], []
        for group in groups:
            payload = codec.decode(GroupPayload, group.payload)
            rewards = group.rewards.astype(np.float64)
            kept = rewards[group.valid == 1]
            reference = torch.from_numpy(codec.decode(Logprobs, group.reference).values.copy()).double()
            for i, sample in enumerate(payload.samples):
                own, reference = reference[: len(sample.tokens)], reference[len(sample.tokens) :]
                if not group.valid[i]:
                    continue
                advantage = (rewards[i] - kept.mean()) / (kept.std(ddof=1) + 1e-6)
                ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
                logits = self.model(ids[None]).logits[0, len(payload.prompt) - 1 : -1] / temperature
                logp_all = torch.log(torch.softmax(logits, -1))
                logp = logp_all[torch.arange(len(sample.tokens)), ids[len(payload.prompt) :]]
                for t in np.flatnonzero(sample.loss_mask):
                    behaviour = float(sample.logprobs[t])
                    weight = min(math.exp(logp[t].item() - behaviour), algorithm.behaviour_weight_cap)
                    policy.append(-weight * advantage * torch.exp(logp[t] - logp[t].detach()))
                    x = logp[t] - own[t]
                    divergence.append((torch.exp(-x) - 1 + x).clamp(max=10))
                    entropies.append(-(logp_all[t].exp() * logp_all[t]).sum())
        means = [torch.stack(values).mean() for values in (policy, divergence, entropies)]
        loss = means[0] + algorithm.kl_coefficient * means[1] - algorithm.entropy_coefficient * means[2]
        self.model.zero_grad()
        loss.backward()
        names = ("actor/pg_loss", "actor/kl_loss", "actor/entropy")
        metrics = {name: mean.item() for name, mean in zip(names, means, strict=True)}
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}
        metrics["actor/grad_norm"] = math.sqrt(sum(float(g.square().sum()) for g in gradients.values() if g is not None))
        return metrics, gradients


SMOOTH = {"eps": 1e-2}  # Adam's first step divides by |g| + eps, which would make signs of the rounding of near-zero gradients


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_is_that_of_a_plain_loop(tmp_path: Path, tied: bool):
    path = make_policy(tmp_path, tied=tied)
    config = make_config(
        path,
        algorithm=LOSS_TERMS,
        sampling={"temperature": 0.8},
        optimizer={**SMOOTH, "max_grad_norm": 0.5, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        training={"max_tokens_per_microbatch": 64},
    )
    engine, groups = policy_trainer(config), make_groups(0)
    before = weights(engine)
    expected, gradients = Oracle(path).gradients(groups, config)
    got = comparable(run_step(engine, groups))
    assert_metrics({name: got[name] for name in expected}, expected)
    assert expected["actor/grad_norm"] > 0.5  # so that clipping is at work
    assert before.keys() == gradients.keys()
    predicted = {}
    for name in before:
        # Adam's first step: m / (1 - β1) = g, v / (1 - β2) = g².
        gradient = gradients[name] * 0.5 / expected["actor/grad_norm"]
        decayed = before[name].double() * (1 - 1e-3 * 0.1 * (gradient.ndim >= 2))
        predicted[name] = decayed - 1e-3 * gradient / (gradient.abs() + SMOOTH["eps"])
    assert_updated(weights(engine), predicted, config.training.optimizer)


def test_the_split_over_calls_and_micro_batches_changes_nothing(policy: str):
    groups = make_groups(1)
    results = []
    for budget, cuts in (
        (8192, [groups]),
        (8192, [[group] for group in groups]),
        (1, [groups]),
        (40, [groups[2:], groups[:2]]),
    ):
        training = {"max_tokens_per_microbatch": budget}
        engine = policy_trainer(make_config(policy, algorithm=LOSS_TERMS, optimizer=SMOOTH, training=training))
        results.append((comparable(run_step(engine, *cuts)), weights(engine)))
    for metrics, after in results[1:]:
        assert_metrics(metrics, results[0][0])
        assert_updated(after, results[0][1], engine._config.training.optimizer)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_every_aggregation_is_over_the_whole_step(policy: str, aggregation: str):
    groups = make_groups(2)
    metrics = []
    for budget in (8192, 1):
        config = make_config(policy, algorithm={"aggregation": aggregation}, training={"max_tokens_per_microbatch": budget})
        metrics.append(comparable(run_step(policy_trainer(config), groups)))
    assert_metrics(*metrics)


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_activation_checkpointing_and_chunked_vocabulary_change_nothing(
    policy: str, monkeypatch: pytest.MonkeyPatch, checkpointing: Any
):
    groups = make_groups(3)
    config = make_config(policy, algorithm=LOSS_TERMS, optimizer=SMOOTH)
    plain = policy_trainer(config)
    expected = comparable(run_step(plain, groups))
    monkeypatch.setattr("runtime.trainer.head.CPU_CHUNK_ELEMENTS", 5 * VOCAB)
    trainer = Trainer(activation_checkpointing=checkpointing)
    saving = policy_trainer(make_config(policy, algorithm=LOSS_TERMS, optimizer=SMOOTH, trainer=trainer))
    assert_metrics(comparable(run_step(saving, groups)), expected)
    assert_updated(weights(saving), weights(plain), config.training.optimizer)


def test_forward_only_rows_leave_the_step_as_it_is(policy: str, monkeypatch: pytest.MonkeyPatch):
    groups = make_groups(4)
    groups[2].rewards = np.full_like(groups[2].rewards, 0.1)
    config = make_config(policy, optimizer=SMOOTH)
    skipping = policy_trainer(config)
    got = comparable(run_step(skipping, groups))
    monkeypatch.setattr(objective.PolicyObjective, "has_gradient", lambda self, advantages: np.ones(len(advantages), bool))
    whole = policy_trainer(config)
    assert_metrics(got, comparable(run_step(whole, groups)))
    assert_updated(weights(skipping), weights(whole), config.training.optimizer)


def test_a_step_without_any_advantage_is_still_a_step(policy: str):
    groups = make_groups(5)
    for group in groups:
        group.rewards = np.zeros_like(group.rewards)
    engine = policy_trainer(make_config(policy))
    before = weights(engine)
    assert comparable(run_step(engine, groups))["actor/grad_norm"] == 0
    assert_same(weights(engine), before)
    assert engine.step == 1


def test_invalid_samples_weigh_nothing(policy: str):
    groups = make_groups(6)
    altered = make_groups(6)
    altered[0].rewards = altered[0].rewards.copy()
    altered[0].rewards[1] = np.nan
    engines = [policy_trainer(make_config(policy)) for _ in range(2)]
    left, right = comparable(run_step(engines[0], groups)), comparable(run_step(engines[1], altered))
    assert left == pytest.approx(right)
    assert_same(weights(engines[0]), weights(engines[1]))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "qwen3_moe",
        "llama3_scaled",
        "llama_biased",
        "qwen2_yarn",
        "mistral",
        "mixtral_sliding",
        "gemma3",
        "gemma3_capped",
        "gpt_oss",
        "deepseek_v3",
        "glm4_moe",
    ],
)
def test_other_families(tmp_path: Path, family: str):
    save_model(tmp_path, family)
    config = make_config(str(tmp_path), algorithm=LOSS_TERMS)
    groups = make_groups(10)
    expected, _ = Oracle(str(tmp_path)).gradients(groups, config)
    got = comparable(run_step(policy_trainer(config), groups))
    assert_metrics({name: got[name] for name in expected}, expected)


def test_devices_without_grouped_attention(policy: str, monkeypatch: pytest.MonkeyPatch):
    groups = make_groups(11)
    expected = comparable(run_step(policy_trainer(make_config(policy)), groups))
    monkeypatch.setattr(passes, "_UNGROUPED", {"cpu"})
    assert_metrics(comparable(run_step(policy_trainer(make_config(policy)), groups)), expected)


def test_sliding_windows_are_kept(tmp_path: Path):
    path = make_policy(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    config = make_config(path, algorithm=LOSS_TERMS)
    groups = make_groups(7)
    expected, _ = Oracle(path).gradients(groups, config)
    got = comparable(run_step(policy_trainer(config), groups))
    assert_metrics({name: got[name] for name in expected}, expected)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 32**0.5), ("bfloat16", 5.65625)])
def test_gemma_scales_embeddings_as_its_rollouts_do(tmp_path: Path, dtype: str, scale: float):
    """Rounded to what is computed in, also where the weights are float32."""
    save_model(tmp_path, "gemma3")
    embedding = policy_trainer(make_config(str(tmp_path), dtype=dtype)).backend.model.model.embed_tokens
    assert embedding.embed_scale.item() == pytest.approx(scale, rel=1e-7)


def test_metrics(policy: str):
    groups = make_groups(8, step=0)
    payloads = [codec.decode(GroupPayload, group.payload) for group in groups]
    lengths = [len(sample.tokens) for payload in payloads for sample in payload.samples]
    rewards = np.concatenate([group.rewards[group.valid == 1] for group in groups])
    engine = policy_trainer(make_config(policy, optimizer={"learning_rate": 1e-2, "warmup_steps": 4}))
    metrics = comparable(run_step(engine, groups))
    assert metrics["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (max(lengths), min(lengths))
    assert metrics["score/mean"] == pytest.approx(rewards.mean())
    assert metrics["score/min"] == pytest.approx(rewards.min())
    assert metrics["actor/lr"] == pytest.approx(2.5e-3)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/ppo_kl"] == pytest.approx(metrics["mismatch/k1"])  # of one version, and before any update
    assert metrics["staleness/token_mean"] == 0
    assert metrics["mismatch/max"] >= metrics["mismatch/abs_logprob_p99"] >= metrics["mismatch/abs_logprob"] > 0
    trained = metrics["mismatch/tokens"]
    assert metrics["mismatch/tokens_of_other_versions"] == 0
    assert "actor/kl_loss" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    # The next step finds only tokens of version 0: one version old, and none to compare engines by.
    metrics = comparable(run_step(engine, groups))
    assert metrics["staleness/token_mean"] == 1
    assert {name: value for name, value in metrics.items() if name.startswith("mismatch/")} == {
        "mismatch/tokens": 0,
        "mismatch/tokens_of_other_versions": trained,
    }


def test_the_gap_to_the_rollout_is_that_of_the_tokens_of_the_version_being_trained(policy: str):
    """The exact numbers are of a forward pass in float64."""
    config = make_config(policy)
    engine, groups, gaps, others = policy_trainer(config), make_groups(3, (20, 24, 16), step=1, longest=16), [], 0
    run_step(engine, make_groups(2))
    model = Oracle(policy).model
    model.load_state_dict({name: tensor.double() for name, tensor in weights(engine).items()}, strict=False)
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        for sample, valid in zip(payload.samples, group.valid, strict=True):
            ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
            with torch.no_grad():
                logp = torch.log_softmax(model(ids[None]).logits[0, len(payload.prompt) - 1 : -1], -1)
            own = logp[torch.arange(len(sample.tokens)), ids[len(payload.prompt) :]].numpy()
            gap = np.abs(own - sample.logprobs)
            steps = np.array([PolicyVersion.unpack(int(version)).step for version in sample.versions])
            trained = sample.loss_mask.astype(bool) & bool(valid)
            gaps += list(gap[trained & (steps == 1)])
            others += int((trained & (steps != 1)).sum())
    metrics = comparable(run_step(engine, groups))
    assert (metrics["mismatch/tokens"], metrics["mismatch/tokens_of_other_versions"]) == (len(gaps), others)
    assert len(gaps) > 100 and others > 100
    assert_close(metrics["mismatch/abs_logprob"], np.mean(gaps), terms=STEP)
    assert_close(metrics["mismatch/max"], max(gaps), terms=forward_terms(22), scale=LOGITS)
    exact = sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1]
    assert exact * 2 ** (-1 / 16) * 0.9999 <= metrics["mismatch/abs_logprob_p99"] <= exact * 1.0001


def test_learning_raises_the_log_probability_of_rewarded_tokens(policy: str):
    groups = make_groups(9)
    engine = policy_trainer(make_config(policy, algorithm={"loss": "ppo"}, optimizer={"learning_rate": 3e-3}))
    losses = [comparable(run_step(engine, groups))["actor/pg_loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05


def test_precision_of_compute_and_wire(policy: str, tmp_path: Path):
    engine = policy_trainer(make_config(policy, dtype="bfloat16"))
    exact = policy_trainer(make_config(policy))
    groups = make_groups(0)
    assert comparable(run_step(engine, groups))["actor/entropy"] == pytest.approx(
        comparable(run_step(exact, groups))["actor/entropy"], rel=2e-2
    )
    assert {spec.dtype for spec in engine.backend.tensor_specs()} == {"bfloat16"}
    assert {spec.dtype for spec in exact.backend.tensor_specs()} == {"float32"}
    engine.backend.export(tmp_path)
    assert "bfloat16" in (tmp_path / "config.json").read_text()
    with pytest.raises(UserError, match=r"model\.dtype: 'float16'"):
        policy_trainer(make_config(policy, dtype="float16"))


def test_a_sampled_padding_token_learns_as_any_other(tmp_path: Path):
    groups, found = make_groups(0, (4, 4)), []
    sampled = int(codec.decode(GroupPayload, groups[0].payload).samples[0].tokens[0])
    for padding in (None, sampled):
        folder = make_policy(tmp_path / "policy")
        described = json.loads((tmp_path / "policy" / "config.json").read_text()) | {"pad_token_id": padding}
        (tmp_path / "policy" / "config.json").write_text(json.dumps(described))
        engine = policy_trainer(make_config(folder))
        run_step(engine, groups)
        found.append(weights(engine))
    assert_same(*found)
