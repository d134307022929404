"""The training engine on one rank, against a plain loop over samples with a stock Hugging Face model."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from runtime import codec
from runtime.config import Config, Trainer
from runtime.engines import packed_attention, train_objective
from runtime.engines.train_torch import TorchTrainEngine
from runtime.errors import InvalidMessage, InvariantViolated, ServiceFault, UserError
from runtime.types import GroupPayload, Logprobs, StepResult, TrainGroup
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import VOCAB, make_config, make_groups, make_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy(tmp_path_factory.mktemp("policy"))


def run_step(engine: TorchTrainEngine, *batches: list[TrainGroup]) -> StepResult:
    engine.begin_step(engine.step)
    for batch in batches:
        engine.accumulate(batch)
    return engine.apply()


def weights(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    specs = engine.tensor_specs()
    out = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
    engine.snapshot(out)
    return {spec.name: tensor for spec, tensor in zip(specs, out, strict=True)}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


class Oracle:
    """One step of GRPO written out: one sample a forward pass, stock attention, float64."""

    def __init__(self, path: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()

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
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        metrics["grad_norm"] = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        return metrics, gradients


LOSS_TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
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
    engine, groups = TorchTrainEngine(config), make_groups(0)
    before = weights(engine)
    expected, gradients = Oracle(path).gradients(groups, config)
    got = run_step(engine, groups).metrics
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert expected["grad_norm"] > 0.5  # so that clipping is at work
    assert before.keys() == gradients.keys()
    for name, after in weights(engine).items():
        # Adam's first step: m / (1 - β1) = g, v / (1 - β2) = g².
        gradient = gradients[name] * 0.5 / expected["grad_norm"]
        decayed = before[name].double() * (1 - 1e-3 * 0.1 * (gradient.ndim >= 2))
        predicted = decayed - 1e-3 * gradient / (gradient.abs() + SMOOTH["eps"])
        torch.testing.assert_close(after.double(), predicted, rtol=1e-5, atol=1e-6)


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
        engine = TorchTrainEngine(make_config(policy, algorithm=LOSS_TERMS, optimizer=SMOOTH, training=training))
        results.append((run_step(engine, *cuts).metrics, weights(engine)))
    for metrics, after in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-6, abs=1e-6)
        assert_same(after, results[0][1], 1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_every_aggregation_is_over_the_whole_step(policy: str, aggregation: str):
    groups = make_groups(2)
    metrics = []
    for budget in (8192, 1):
        config = make_config(policy, algorithm={"aggregation": aggregation}, training={"max_tokens_per_microbatch": budget})
        metrics.append(run_step(TorchTrainEngine(config), groups).metrics)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


def test_activation_checkpointing_and_chunked_vocabulary_change_nothing(policy: str, monkeypatch: pytest.MonkeyPatch):
    groups = make_groups(3)
    plain = TorchTrainEngine(make_config(policy, algorithm=LOSS_TERMS))
    expected = run_step(plain, groups).metrics
    monkeypatch.setattr(train_objective, "CHUNK_ELEMENTS", 5 * VOCAB)
    saving = TorchTrainEngine(make_config(policy, algorithm=LOSS_TERMS, trainer=Trainer(activation_checkpointing=True)))
    assert run_step(saving, groups).metrics == pytest.approx(expected, rel=1e-6)
    assert_same(weights(saving), weights(plain), 1e-6)


def test_forward_only_rows_leave_the_step_as_it_is(policy: str, monkeypatch: pytest.MonkeyPatch):
    groups = make_groups(4)
    groups[2].rewards = np.full_like(groups[2].rewards, 0.1)
    skipping = TorchTrainEngine(make_config(policy))
    got = run_step(skipping, groups).metrics
    monkeypatch.setattr(train_objective.Objective, "has_gradient", lambda self, advantages: np.ones(len(advantages), bool))
    whole = TorchTrainEngine(make_config(policy))
    assert got == pytest.approx(run_step(whole, groups).metrics, rel=1e-6)
    assert_same(weights(skipping), weights(whole), 1e-7)


def test_a_step_without_any_advantage_is_still_a_step(policy: str):
    groups = make_groups(5)
    for group in groups:
        group.rewards = np.zeros_like(group.rewards)
    engine = TorchTrainEngine(make_config(policy))
    before = weights(engine)
    assert run_step(engine, groups).metrics["grad_norm"] == 0
    assert_same(weights(engine), before)
    assert engine.step == 1


def test_invalid_samples_weigh_nothing(policy: str):
    groups = make_groups(6)
    altered = make_groups(6)
    altered[0].rewards = altered[0].rewards.copy()
    altered[0].rewards[1] = np.nan
    engines = [TorchTrainEngine(make_config(policy)) for _ in range(2)]
    left, right = run_step(engines[0], groups).metrics, run_step(engines[1], altered).metrics
    assert left == pytest.approx(right)
    assert_same(weights(engines[0]), weights(engines[1]))


@pytest.mark.parametrize("family", ["qwen3", "llama3_scaled", "llama_biased"])
def test_other_families(tmp_path: Path, family: str):
    save_model(tmp_path, family)
    config = make_config(str(tmp_path), algorithm=LOSS_TERMS)
    groups = make_groups(10)
    expected, _ = Oracle(str(tmp_path)).gradients(groups, config)
    got = run_step(TorchTrainEngine(config), groups).metrics
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_devices_without_grouped_attention(policy: str, monkeypatch: pytest.MonkeyPatch):
    groups = make_groups(11)
    expected = run_step(TorchTrainEngine(make_config(policy)), groups).metrics
    monkeypatch.setattr(packed_attention, "_UNGROUPED", {"cpu"})
    assert run_step(TorchTrainEngine(make_config(policy)), groups).metrics == pytest.approx(expected, rel=1e-6)


def test_models_that_would_mix_packed_sequences_are_refused(tmp_path: Path):
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    shape = {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    FalconMambaForCausalLM(FalconMambaConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.path: .* a falcon_mamba model cannot be trained packed"):
        TorchTrainEngine(make_config(str(tmp_path)))


def test_what_lies_outside_the_mask_has_no_say(policy: str):
    groups, altered = make_groups(12), make_groups(12)
    for group in altered:
        payload = codec.decode(GroupPayload, group.payload)
        for sample in payload.samples:
            sample.logprobs = np.where(sample.loss_mask == 0, np.float32(-1e4), sample.logprobs)
        group.payload = codec.encode(payload)
    config = make_config(policy, algorithm={**LOSS_TERMS, "loss": "ppo"})
    left, right = (run_step(TorchTrainEngine(config), each).metrics for each in (groups, altered))
    assert left == right


def test_sliding_windows_are_kept(tmp_path: Path):
    path = make_policy(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    config = make_config(path, algorithm=LOSS_TERMS)
    groups = make_groups(7)
    expected, _ = Oracle(path).gradients(groups, config)
    got = run_step(TorchTrainEngine(config), groups).metrics
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_metrics(policy: str):
    groups = make_groups(8, step=0)
    payloads = [codec.decode(GroupPayload, group.payload) for group in groups]
    lengths = [len(sample.tokens) for payload in payloads for sample in payload.samples]
    rewards = np.concatenate([group.rewards[group.valid == 1] for group in groups])
    engine = TorchTrainEngine(make_config(policy, optimizer={"learning_rate": 1e-2, "warmup_steps": 4}))
    metrics = run_step(engine, groups).metrics
    assert metrics["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (max(lengths), min(lengths))
    assert metrics["grpo/score/mean"] == pytest.approx(rewards.mean())
    assert metrics["grpo/score/min"] == pytest.approx(rewards.min())
    assert metrics["actor/lr"] == pytest.approx(2.5e-3)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["staleness/token_mean"] == 0
    assert metrics["mismatch/max"] >= metrics["mismatch/abs_logprob"] > 0
    assert "actor/kl_loss" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    # The next step finds only tokens of version 0: one version old, and none to compare engines by.
    metrics = run_step(engine, groups).metrics
    assert metrics["staleness/token_mean"] == 1
    assert not [name for name in metrics if name.startswith("mismatch/")]


def test_learning_raises_the_log_probability_of_rewarded_tokens(policy: str):
    groups = make_groups(9)
    engine = TorchTrainEngine(make_config(policy, algorithm={"loss": "ppo"}, optimizer={"learning_rate": 3e-3}))
    losses = [run_step(engine, groups).metrics["actor/pg_loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05


class TestCheckpoint:
    def test_next_steps_are_bit_equal(self, policy: str, tmp_path: Path):
        schedule = {"schedule": "cosine", "warmup_steps": 2}
        config = make_config(policy, algorithm=LOSS_TERMS, optimizer=schedule, training={"steps": 9})
        first = TorchTrainEngine(config)
        for seed in range(3):
            run_step(first, make_groups(seed))
        first.save(str(tmp_path))
        second = TorchTrainEngine(config)
        run_step(second, make_groups(40))  # a history that the checkpoint must erase
        torch.manual_seed(99)
        generator = torch.get_rng_state()
        second.load(str(tmp_path))
        assert second.step == 3
        assert not torch.equal(torch.get_rng_state(), generator)
        for seed in range(3, 6):
            left, right = run_step(first, make_groups(seed)), run_step(second, make_groups(seed))
            assert (left.step, left.metrics) == (right.step, right.metrics)
        assert_same(weights(first), weights(second))

    def test_before_the_first_step(self, policy: str, tmp_path: Path):
        config = make_config(policy)
        first, second = TorchTrainEngine(config), TorchTrainEngine(config)
        first.save(str(tmp_path))
        run_step(second, make_groups(0))
        second.load(str(tmp_path))
        assert run_step(first, make_groups(1)).metrics == run_step(second, make_groups(1)).metrics
        assert_same(weights(first), weights(second))

    def test_holds_no_pickle_and_splits_large_files(self, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("runtime.engines.hf_policy.SHARD_BYTES", 20_000)
        engine = TorchTrainEngine(make_config(policy))
        run_step(engine, make_groups(0))
        engine.save(str(tmp_path))
        kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert kinds == {".json", ".safetensors"}
        assert len(list(tmp_path.glob("optimizer-*.safetensors"))) > 1
        other = TorchTrainEngine(make_config(policy))
        other.load(str(tmp_path))
        assert_same(weights(other), weights(engine))

    def test_of_another_model_is_refused(self, policy: str, tmp_path: Path):
        (tmp_path / "other").mkdir()
        (tmp_path / "save").mkdir()
        TorchTrainEngine(make_config(make_policy(tmp_path / "other", tied=False))).save(str(tmp_path / "save"))
        engine = TorchTrainEngine(make_config(policy))
        before = weights(engine)
        with pytest.raises(UserError, match=r"another model; 1 tensors differ, such as lm_head\.weight"):
            engine.load(str(tmp_path / "save"))
        assert_same(weights(engine), before)
        with pytest.raises(UserError, match=r"trainer\.json cannot be read"):
            engine.load(str(tmp_path / "other"))


@pytest.mark.parametrize("tied", [True, False])
def test_export_is_a_hugging_face_folder(tmp_path: Path, tied: bool):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    (tmp_path / "policy").mkdir()
    (tmp_path / "export").mkdir()
    path = make_policy(tmp_path / "policy", tied=tied)
    engine = TorchTrainEngine(make_config(path))
    run_step(engine, make_groups(0))
    engine.export(str(tmp_path / "export"))
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == (tmp_path / "policy" / "tokenizer.json").read_bytes()
    names = load_file(tmp_path / "export" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "policy" / "model.safetensors").keys() == {spec.name for spec in engine.tensor_specs()}
    assert ("lm_head.weight" in names) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_same({name: tensor.detach() for name, tensor in model.named_parameters()}, weights(engine))


def test_precision_of_compute_and_wire(policy: str, tmp_path: Path):
    engine = TorchTrainEngine(make_config(policy, dtype="bfloat16"))
    exact = TorchTrainEngine(make_config(policy))
    groups = make_groups(0)
    assert run_step(engine, groups).metrics["actor/entropy"] == pytest.approx(
        run_step(exact, groups).metrics["actor/entropy"], rel=2e-2
    )
    assert {spec.dtype for spec in engine.tensor_specs()} == {"bfloat16"}
    assert {spec.dtype for spec in exact.tensor_specs()} == {"float32"}
    engine.export(str(tmp_path))
    assert "bfloat16" in (tmp_path / "config.json").read_text()
    with pytest.raises(UserError, match=r"model\.dtype: 'float16'"):
        TorchTrainEngine(make_config(policy, dtype="float16"))


class TestFaults:
    def test_non_finite_gradient_is_an_error_and_changes_nothing(self, policy: str):
        groups = make_groups(0)
        groups[0].rewards = groups[0].rewards.copy()
        groups[0].rewards[0] = np.inf
        engine = TorchTrainEngine(make_config(policy))
        before = weights(engine)
        with pytest.raises(ServiceFault, match="trainer: apply: step 0: the gradient norm is nan") as caught:
            run_step(engine, groups)
        assert caught.value.phase == "apply"
        assert_same(weights(engine), before)
        assert run_step(engine, make_groups(0)).step == 0

    def test_steps_come_in_order(self, policy: str):
        engine = TorchTrainEngine(make_config(policy))
        with pytest.raises(InvariantViolated, match="step 0, but step 2 begins"):
            engine.begin_step(2)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda group: setattr(group, "reference", None), "group 0: has no reference log-probabilities"),
            (lambda group: setattr(group, "rewards", group.rewards[1:]), "group 0: .* 4 samples, with 3 rewards"),
            (lambda group: setattr(group, "payload", b"\x00"), "not a GroupPayload"),
            (lambda group: edit_sample(group, tokens=np.array([VOCAB], np.int32)), "lengths"),
            (lambda group: edit_tokens(group, VOCAB), f"a token outside the vocabulary of {VOCAB}"),
        ],
    )
    def test_malformed_groups_are_refused_whole(self, policy: str, change, message: str):
        engine = TorchTrainEngine(make_config(policy, algorithm=LOSS_TERMS))
        groups = make_groups(0)
        change(groups[0])
        engine.begin_step(0)
        with pytest.raises(InvalidMessage, match=message):
            engine.accumulate(groups)
        engine.accumulate(make_groups(0))
        clean = run_step(TorchTrainEngine(make_config(policy, algorithm=LOSS_TERMS)), make_groups(0))
        assert engine.apply().metrics == clean.metrics

    def test_bad_model_folders(self, policy: str, tmp_path: Path):
        with pytest.raises(UserError, match=r"model\.path: .* no config\.json"):
            TorchTrainEngine(make_config(str(tmp_path)))
        (tmp_path / "config.json").write_bytes((Path(policy) / "config.json").read_bytes())
        with pytest.raises(UserError, match=r"model\.path: .* cannot be loaded: .*safetensors"):
            TorchTrainEngine(make_config(str(tmp_path)))

    def test_a_missing_weight_is_named(self, policy: str, tmp_path: Path):
        from safetensors.torch import load_file, save_file

        (tmp_path / "config.json").write_bytes((Path(policy) / "config.json").read_bytes())
        tensors = load_file(Path(policy) / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"1 weights are wrong \(missing_keys: model\.norm\.weight"):
            TorchTrainEngine(make_config(str(tmp_path)))

    def test_unknown_names_and_impossible_options(self, policy: str):
        with pytest.raises(UserError, match=r"algorithm\.aggregation: unknown name"):
            TorchTrainEngine(make_config(policy, algorithm={"aggregation": "mean"}))
        with pytest.raises(UserError, match=r"services\.trainer\.cpu_offload"):
            TorchTrainEngine(make_config(policy, trainer=Trainer(cpu_offload=True)))


def edit_tokens(group: TrainGroup, token: int) -> None:
    payload = codec.decode(GroupPayload, group.payload)
    edit_sample(group, tokens=np.full_like(payload.samples[0].tokens, token))


def edit_sample(group: TrainGroup, **fields: np.ndarray) -> None:
    payload = codec.decode(GroupPayload, group.payload)
    payload.samples[0] = msgspec.structs.replace(payload.samples[0], **fields)
    group.payload = codec.encode(payload)
