"""Steps of the training engine on one rank, of every family, against plain loops over samples with transformers' model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from runtime import types
from runtime.cluster.topology import replicas
from runtime.config import Config, Lora, Trainer
from runtime.errors import UserError
from runtime.models import experts, forward, hf_folder
from runtime.models.experts import join_experts, mixture, route
from runtime.trainer import objective
from runtime.trainer.backend import micro_batches
from runtime.trainer.rows import Needs, check_groups, rows_of
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer
from runtime.types import GroupPayload, PolicyVersion, TrainGroup, ValueRequest
from services.rollout import make_engine
from tests.closeness import BFLOAT16, LOGITS, STEP, assert_close, forward_terms
from tests.unit.lora_cases import LORA, lora_config
from tests.unit.test_train_updates import PPO
from tests.unit.test_train_updates import settings as update_settings
from tests.unit.tiny_models import WIDE, save_classifier, save_model
from tests.unit.training_cases import VOCAB, make_config, make_groups, make_policy, with_swaps
from tests.unit.training_oracle import Oracle
from tests.unit.training_steps import LOSS_TERMS, assert_metrics, assert_same, assert_updated, comparable, run_step, weights

pytestmark = pytest.mark.numeric


PADDED = sorted(WIDE.keys() - set(hf_folder.PACKED))
STATE_SPACE = ["falcon_h1", "mamba2"]
KNOWN = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma3", "gpt_oss", "deepseek_v3", "glm4_moe"]
OTHERS = ["llama3_scaled", "llama_biased", "qwen2_yarn", "mixtral_sliding", "gemma3_capped"]
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


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_activation_checkpointing_and_chunked_vocabulary_change_nothing(
    policy: str, monkeypatch: pytest.MonkeyPatch, checkpointing: Any
):
    groups = make_groups(3)
    config = make_config(policy, algorithm=LOSS_TERMS, optimizer=SMOOTH)
    plain = policy_trainer(config)
    expected = comparable(run_step(plain, groups))
    monkeypatch.setattr("runtime.trainer.backend.CPU_CHUNK_ELEMENTS", 5 * VOCAB)
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model, to be read alone."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def save(family: str) -> Path:
        save_model(folder / family, family)
        return folder / family

    return save


@pytest.mark.parametrize(
    "family", [*sorted({*KNOWN, *OTHERS} - {"llama", "qwen2", "mixtral"}), *PADDED, "granite", "olmo3", "phi3"]
)
def test_other_families(saved: Callable[[str], Path], family: str):
    config = make_config(str(saved(family)), algorithm=LOSS_TERMS, training={"max_tokens_per_microbatch": 60})
    assert_plain(config, make_groups(10))


def assert_plain(config: Config, groups: list[TrainGroup]) -> None:
    """Losses, and the norm of the gradient over all weights, are those of a plain loop."""
    expected, _ = Oracle(config.model.path).gradients(groups, config)
    got = comparable(run_step(policy_trainer(config), groups))
    assert_metrics({name: got[name] for name in expected}, expected)


def test_devices_without_grouped_attention(policy: str, monkeypatch: pytest.MonkeyPatch):
    groups = make_groups(11)
    expected = comparable(run_step(policy_trainer(make_config(policy)), groups))
    monkeypatch.setattr(forward, "_UNGROUPED", {"cpu"})
    assert_metrics(comparable(run_step(policy_trainer(make_config(policy)), groups)), expected)


def test_sliding_windows_are_kept(tmp_path: Path):
    path = make_policy(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert_plain(make_config(path, algorithm=LOSS_TERMS), make_groups(7))


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 32**0.5), ("bfloat16", 5.65625)])
def test_gemma_scales_embeddings_as_its_rollouts_do(tmp_path: Path, dtype: str, scale: float):
    """Rounded to what is computed in, also where the weights are float32."""
    save_model(tmp_path, "gemma3")
    embedding = policy_trainer(make_config(str(tmp_path), dtype=dtype)).backend.model.model.embed_tokens
    assert embedding.embed_scale.item() == pytest.approx(scale, rel=1e-7)


def test_metrics(policy: str):
    groups = make_groups(8, step=0)
    payloads = [types.decode(GroupPayload, group.payload) for group in groups]
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
        "mismatch/older_keys_tokens": 0,
        "mismatch/tokens_of_other_versions": trained,
    }


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_the_gap_to_the_rollout_is_that_of_the_tokens_of_the_version_being_trained(policy: str, in_flight: str):
    """The exact numbers are of a forward pass in float64."""
    config = make_config(policy)
    config = replace(config, weight_sync=replace(config.weight_sync, in_flight=in_flight))
    engine, others = policy_trainer(config), 0
    groups = [with_swaps(group) for group in make_groups(3, (20, 24, 16), step=1, longest=16)]
    gaps: list[float] = []
    over_older_keys: list[float] = []
    run_step(engine, make_groups(2))
    oracle = Oracle(policy)
    oracle.model.load_state_dict({name: tensor.double() for name, tensor in weights(engine).items()}, strict=False)
    for row in oracle.rows(groups):
        gap = np.abs(row.logp.detach().numpy() - row.sample.logprobs)
        steps = np.array([PolicyVersion.unpack(int(version)).step for version in row.sample.versions])
        trained = row.sample.loss_mask.astype(bool) & bool(row.group.valid[row.index])
        older = (np.cumsum(trained & (steps != 1)) > 0) & (in_flight == "keep")
        gaps += list(gap[trained & (steps == 1) & ~older])
        over_older_keys += list(gap[trained & (steps == 1) & older])
        others += int((trained & (steps != 1)).sum())
    metrics = comparable(run_step(engine, groups))
    assert (metrics["mismatch/tokens"], metrics["mismatch/tokens_of_other_versions"]) == (len(gaps), others)
    assert len(gaps) > 50 and others > 100
    assert metrics["mismatch/older_keys_tokens"] == len(over_older_keys)
    assert (len(over_older_keys) > 50) == (in_flight == "keep")
    if over_older_keys:
        assert_close(metrics["mismatch/older_keys_abs_logprob"], np.mean(over_older_keys), terms=STEP)
        assert_close(metrics["mismatch/older_keys_max"], max(over_older_keys), terms=forward_terms(22), scale=LOGITS)
    assert_close(metrics["mismatch/abs_logprob"], np.mean(gaps), terms=STEP)
    assert_close(metrics["mismatch/max"], max(gaps), terms=forward_terms(22), scale=LOGITS)
    exact = sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1]
    assert exact * 2 ** (-1 / 16) * 0.9999 <= metrics["mismatch/abs_logprob_p99"] <= exact * 1.0001


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
    assert "bfloat16" not in (tmp_path / "config.json").read_text()  # as the folder that it comes from
    with pytest.raises(UserError, match=r"model\.dtype: 'float16'"):
        policy_trainer(make_config(policy, dtype="float16"))


def test_a_sampled_padding_token_learns_as_any_other(tmp_path: Path):
    groups, found = make_groups(0, (4, 4)), []
    sampled = int(types.decode(GroupPayload, groups[0].payload).samples[0].tokens[0])
    for padding in (None, sampled):
        folder = make_policy(tmp_path / "policy")
        described = json.loads((tmp_path / "policy" / "config.json").read_text()) | {"pad_token_id": padding}
        (tmp_path / "policy" / "config.json").write_text(json.dumps(described))
        engine = policy_trainer(make_config(folder))
        run_step(engine, groups)
        found.append(weights(engine))
    assert_same(*found)


# -------------------------------------------------------------------------------- families that Sluice knows nothing of


def logprobs(engine: ModelTrainer, groups: list[TrainGroup], budget: int) -> np.ndarray:
    """float32 flat: of each trained token, by micro-batches of at most `budget` tokens; 0 elsewhere."""
    rows, found = rows_of(check_groups(groups, VOCAB, Needs()), Needs()), engine.backend
    out = np.zeros(len(rows.tokens), np.float32)
    batches = micro_batches(rows, rows.trained(), {}, budget, found.rank_info, found.packs)
    with torch.no_grad():
        for batch, numbers in found.infer(batches, lambda b, o: found.token_logprobs(o, b, 1.0, entropy_gradient=False)[0]):
            out[batch.places] = numbers.numpy()
    return out


@cache
def alone(path: Path) -> np.ndarray:
    """Of transformers' model, one sequence a forward pass."""
    return Oracle(str(path)).trained_logprobs(long_groups())


def long_groups() -> list[TrainGroup]:
    return make_groups(3, (5, 3, 4), longest=24)


@pytest.mark.parametrize("family", sorted(WIDE))
def test_sequences_run_together_have_the_log_probabilities_of_each_alone(saved: Callable[[str], Path], family: str) -> None:
    engine = policy_trainer(make_config(str(saved(family))))
    assert engine.backend.packs == (family in hf_folder.PACKED)
    expected = alone(saved(family))
    assert np.abs(expected).max() > 1
    for budget in (1 << 20, 60):
        assert_close(logprobs(engine, long_groups(), budget), expected, terms=forward_terms(30), scale=LOGITS, what=family)


def test_padding_is_told_and_counts_in_the_budget(saved: Callable[[str], Path]) -> None:
    engine = policy_trainer(make_config(str(saved("lfm2"))))
    rows = rows_of(check_groups(long_groups(), VOCAB, Needs()), Needs())
    made = list(micro_batches(rows, rows.trained(), {}, 60, engine.backend.rank_info, engine.backend.packs))
    assert sorted(np.concatenate([batch.samples for batch in made])) == np.flatnonzero(rows.trained()).tolist()
    for batch in made:
        (cells,) = batch.packing.rows
        fed = rows.prompt_length[rows.group[batch.samples]] + rows.length[batch.samples] - 1
        assert cells.shape[1] == fed.max() and (batch.attended, batch.attended - batch.padding) == (cells.numel(), fed.sum())
        assert batch.attended <= 60 or len(batch.samples) == 1
    assert len(made) > 2


def with_changed_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_without_a_place_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_next")
    extra = {f"model.layers.0.extra{index}.weight": torch.zeros(1) for index in range(3)}
    with_changed_weights(
        tmp_path, lambda tensors: tensors.update(extra, **{"mtp.norm.weight": torch.zeros(1)})
    )  # which nobody asks for
    with pytest.raises(UserError, match=r"^model\.path: .*: 3 weights do not belong to the model: ") as caught:
        policy_trainer(make_config(str(tmp_path)))
    assert all(name in str(caught.value) for name in extra) and "mtp.norm" not in str(caught.value)


def test_weights_that_transformers_holds_under_other_names_are_named(tmp_path: Path) -> None:
    """As a folder of the body alone has them, which transformers reads all the same."""
    save_model(tmp_path, "granite")
    names = load_file(tmp_path / "model.safetensors").keys()
    with_changed_weights(
        tmp_path, lambda tensors: [tensors.update({n.removeprefix("model."): tensors.pop(n)}) for n in list(tensors)]
    )
    with pytest.raises(
        UserError, match=rf"^model\.path: .* holds {len(names)} weights under other names than the folder"
    ) as caught:
        policy_trainer(make_config(str(tmp_path)))
    assert all(name in str(caught.value) for name in names)


def test_dropout_of_any_kind_is_off(tmp_path: Path) -> None:
    """Two passes give the same: the policy is the one that sampled."""
    folder, groups = tmp_path, make_groups(3)
    save_model(folder, "opt")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"dropout": 0.5, "attention_dropout": 0.5}))
    engine = policy_trainer(make_config(str(folder)))
    assert np.array_equal(*(logprobs(engine, groups, 1 << 20) for _ in range(2)))


@pytest.mark.parametrize(
    ("dtype", "lora", "computes"),
    [("auto", None, torch.float32), ("float32", LORA, torch.float32), ("bfloat16", None, torch.bfloat16)],
)
def test_rollouts_compute_with_the_numbers_of_the_trainer(
    tmp_path: Path, dtype: str, lora: Lora | None, computes: torch.dtype
) -> None:
    """Of a folder in bfloat16, with weights and a learning rate of the usual size: an update is below a weight's last digit."""
    folder = Path(make_policy(tmp_path / "policy", initializer_range=0.02, max_position_embeddings=1024))
    described = folder / "config.json"
    described.write_text(described.read_text().replace("float32", "bfloat16"))
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    made = lora_config(str(folder), lora, optimizer={"learning_rate": 1e-6, "eps": 1e-8})
    made = replace(made, model=replace(made.model, dtype=dtype))
    engine = policy_trainer(made)
    for seed in range(2):
        run_step(engine, make_groups(seed))
    trained = {name: tensor.detach().to(computes) for name, tensor in engine.backend.parameters.items()}
    (fleet,) = replicas(made)
    rolled_out: Any = make_engine(made, fleet)
    (served,) = {tensor.dtype for tensor in rolled_out._decoder.weights._views.values()}
    assert served == computes
    if lora is None:
        assert_same(weights(engine), trained)
        assert any(not torch.equal(trained[name], tensor.to(computes)) for name, tensor in stored.items())
    assert {spec.dtype for spec in engine.backend.tensor_specs()} == {str(computes).removeprefix("torch.")}
    (tmp_path / "export").mkdir()
    engine.backend.export(tmp_path / "export")
    exported = [tensor for file in (tmp_path / "export").glob("*.safetensors") for tensor in load_file(file).values()]
    assert {tensor.dtype for tensor in exported} == {torch.bfloat16}


@pytest.mark.parametrize("family", STATE_SPACE)
def test_layers_that_peft_refuses_are_told(saved: Callable[[str], Path], family: str) -> None:
    with pytest.raises(UserError, match=r"^lora\.target_modules: .*Module 'out_proj' is incompatible with Mamba-based models"):
        policy_trainer(lora_config(str(saved(family))))


@pytest.mark.parametrize("family", [*KNOWN, *sorted(WIDE)])
def test_trained_with_adapters_it_leaves_with_them_merged(saved: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    """What is published is what computes: transformers' model of it has the log-probabilities of the model with adapters."""
    before = saved(family)
    targets = ["in_proj"] if family in STATE_SPACE else []
    engine = policy_trainer(lora_config(str(before), replace(LORA, target_modules=targets)))
    for seed in range(2):
        run_step(engine, make_groups(seed))
    shutil.copytree(before, tmp_path / "after")
    save_file(weights(engine), tmp_path / "after" / "model.safetensors", metadata={"format": "pt"})
    after = alone(tmp_path / "after")
    close = partial(assert_close, terms=forward_terms(20, layers=4), scale=LOGITS, what=family)
    with pytest.raises(AssertionError, match="at most"):
        close(alone(before), after)  # what the adapters learned is more than rounding
    close(logprobs(engine, long_groups(), 60), after)


def test_a_family_without_a_classifier_has_no_critic(saved: Callable[[str], Path]) -> None:
    path = str(saved("olmo3"))
    with pytest.raises(UserError, match=r"^critic\.path: .* cannot be loaded: Unrecognized configuration class"):
        critic_trainer(update_settings(path, algorithm=PPO, critic=path))


@pytest.mark.parametrize("family", ["opt", "phi3", "qwen3_next"])
def test_a_critic_has_the_values_of_each_sequence_alone(tmp_path: Path, family: str) -> None:
    model, groups = save_classifier(tmp_path, family), long_groups()
    engine = critic_trainer(update_settings(str(tmp_path), algorithm=PPO, critic=str(tmp_path), max_tokens_per_microbatch=60))
    assert engine.backend.packs == (family in hf_folder.PACKED)
    found = engine.values([ValueRequest(group_id=g.group_id, tokens=g.tokens, payload=g.payload) for g in groups])
    for group, values in zip(groups, found, strict=True):
        payload = types.decode(GroupPayload, group.payload)
        expected = []
        for sample in payload.samples:
            ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
            with torch.no_grad():
                scores = model.score(model.base_model(ids[None]).last_hidden_state)[0, len(payload.prompt) - 1 : -1, 0]
            expected.append(scores.numpy() * sample.loss_mask)
        wanted = np.concatenate(expected)
        assert np.abs(wanted).max() > 0.1
        assert_close(values.values, wanted, terms=forward_terms(30), scale=LOGITS)


# -------------------------------------------------------------------------------- a mixture of experts computed at once

HIDDEN, INNER = 8, 6


def one_after_the_other(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows = []
    for token, picks, shares in zip(x, chosen.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for expert, share in zip(picks, shares, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            row = row + share * (down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.fixture(params=["grouped", "grouped, odd", "apart", "apart, no bags", "apart, stacked", "grouped, stacked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if ("grouped" in request.param or "stacked" in request.param) and experts._grouped_mm is None:
        pytest.skip("this torch has no grouped product")
    if request.param == "apart, no bags":  # as on accelerators
        monkeypatch.setattr(experts, "_BAGS", set())
    if "stacked" in request.param:
        monkeypatch.setattr(experts, "_STACKED", {"cpu"})
    return request.param


@given(data=st.data(), tokens=st.integers(1, 12), count=st.integers(1, 6), normalized=st.booleans(), seed=st.integers(0, 99))
def test_outputs_and_gradients_are_those_of_one_expert_after_the_other(
    data: st.DataObject, tokens: int, count: int, normalized: bool, seed: int
):
    """In float64; experts without tokens are among them."""
    torch.manual_seed(seed)
    per_token = data.draw(st.integers(1, count))
    inputs = [
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((tokens, HIDDEN), (tokens, count), (count, 2 * INNER, HIDDEN), (count, HIDDEN, INNER))
    ]
    results = []
    for compute in (mixture, one_after_the_other):
        x, logits, gate_up, down = inputs
        weights = torch.softmax(logits, -1).topk(per_token).values
        weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
        out = compute(x, weights, logits.topk(per_token).indices, gate_up, down)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_computes_the_same(way: str, dtype: torch.dtype):
    torch.manual_seed(0)
    x, logits, inner = torch.randn(30, HIDDEN, dtype=dtype), torch.randn(30, 5), INNER if "odd" in way else 2 * INNER - 4
    gate_up, down = torch.randn(5, 2 * inner, HIDDEN, dtype=dtype), torch.randn(5, HIDDEN, inner, dtype=dtype)
    weights, chosen = route(logits, 2, normalized=True)
    expected = one_after_the_other(x.double(), weights.double(), chosen, gate_up.double(), down.double())
    given = (gate_up, down) if "grouped" in way else (list(gate_up), list(down))
    unit = {"unit": BFLOAT16} if dtype == torch.bfloat16 else {}
    with torch.inference_mode():
        assert_close(mixture(x, weights, chosen, *given), expected, terms=HIDDEN + inner + 2, **unit)
    assert_close(mixture(x, weights, chosen, *given), expected, terms=HIDDEN + inner + 2, **unit)
    chosen = chosen % 4  # the last expert has no tokens
    doubles, inputs = (
        [each.to(kind).clone().requires_grad_() for each in (x, gate_up, down)] for kind in (torch.float64, dtype)
    )
    one_after_the_other(doubles[0], weights.double(), chosen, *doubles[1:]).sum().backward()
    given = inputs[1:] if "grouped" in way else [list(each.unbind()) for each in inputs[1:]]
    if "stacked" in way and "apart" in way:
        given[0] = [half for each in given[0] for half in each.chunk(2)]  # gate and up apart
    mixture(inputs[0], weights, chosen, *given).sum().backward()
    for got, wanted in zip(inputs, doubles, strict=True):
        scale = float(wanted.grad.abs().max())
        assert_close(got.grad, wanted.grad, terms=4 * (HIDDEN + inner), scale=scale, **unit)


SHAPE = {"hidden_size": HIDDEN, "num_experts_per_tok": 2}


def block(**options: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    shape = SHAPE | {"moe_intermediate_size": INNER, "num_experts": 16}
    return Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(**shape | options)).double()


def mixtral_block() -> torch.nn.Module:
    torch.manual_seed(1)
    shape = SHAPE | {"intermediate_size": INNER, "num_local_experts": 16, "router_jitter_noise": 0.5}
    return MixtralSparseMoeBlock(transformers.MixtralConfig(**shape)).double()


def gpt_oss_block() -> torch.nn.Module:
    torch.manual_seed(1)
    shape = SHAPE | {"intermediate_size": INNER, "num_local_experts": 16}
    made = GptOssMLP(transformers.GptOssConfig(**shape)).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=3.0)  # so that some gates and some of the others are clamped
    return made


@pytest.mark.parametrize(
    ("make", "terms"),  # the weights of experts are float32
    [
        (partial(block, norm_topk_prob=False), 16),
        (partial(block, norm_topk_prob=True), 16),
        (mixtral_block, 64),
        (gpt_oss_block, 64),
    ],
    ids=["qwen3", "qwen3 normalized", "mixtral", "gpt_oss"],
)
def test_blocks_of_transformers_have_the_same_outputs_router_logits_and_gradients(make: Any, terms: int):
    ours, theirs = make(), make().eval()  # without jitter
    join_experts(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, found = torch.randn(1, 9, HIDDEN, dtype=torch.float64), []  # 18 picks of 16 experts: some have none
    for module in (ours, theirs):
        given = x.clone().requires_grad_()
        out, logits = module(given)
        if make is gpt_oss_block:  # of which ours gives the chosen experts' alone
            logits = out[..., :0]
        (out.square().sum() + logits.square().sum()).backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        found.append({"out": out, "logits": logits, "x": given.grad, **gradients})
    assert make is gpt_oss_block or any(gradient is None for gradient in found[1].values())
    for name, expected in found[1].items():
        if expected is None:
            assert found[0][name] is None or not found[0][name].any(), name
        else:
            assert_close(found[0][name], expected, terms=terms, what=name)


def test_experts_are_computed_together(monkeypatch: pytest.MonkeyPatch):
    """Not by the block's own forward pass."""
    ours, called = block(), []
    join_experts(ours)
    monkeypatch.setattr(type(ours.experts[0]), "forward", lambda *_: called.append(1))
    ours(torch.randn(1, 4, HIDDEN, dtype=torch.float64))
    assert not called


def test_an_adapter_in_one_expert_is_heeded():
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    ours, theirs = block(), block()
    for module in (ours, theirs):
        old, module.experts[7].down_proj = module.experts[7].down_proj, Doubled(INNER, HIDDEN, bias=False).double()
        module.experts[7].down_proj.weight = old.weight
    join_experts(ours)
    x = torch.randn(1, 40, HIDDEN, dtype=torch.float64)
    assert_close(ours(x)[0], theirs(x)[0], terms=16, what="out")


def test_another_activation_is_left_to_the_block():
    ours, theirs = block(hidden_act="gelu"), block(hidden_act="gelu")
    join_experts(ours)
    x = torch.randn(1, 5, HIDDEN, dtype=torch.float64)
    assert torch.equal(ours(x)[0], theirs(x)[0])
