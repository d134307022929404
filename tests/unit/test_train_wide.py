"""Families that Sluice knows nothing of, trained by engine torch as transformers has them: no sequence sees another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from runtime import codec
from runtime.errors import UserError
from runtime.models import hf_config
from runtime.trainer.micro_batch import micro_batches
from runtime.trainer.rows import Needs, decode_groups
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer
from runtime.types import GroupPayload, TrainGroup, ValueRequest
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.lora_cases import LORA, lora_config
from tests.unit.test_train_torch import Oracle
from tests.unit.test_train_updates import PPO, settings
from tests.unit.tiny_models import WIDE, save_classifier, save_model
from tests.unit.training_cases import VOCAB, make_config, make_groups
from tests.unit.training_steps import LOSS_TERMS, assert_metrics, comparable, run_step, weights

pytestmark = pytest.mark.numeric

PADDED = sorted(WIDE.keys() - set(hf_config.PACKED))


def logprobs(engine: ModelTrainer, groups: list[TrainGroup], budget: int) -> np.ndarray:
    """float32 flat: of each trained token, by micro-batches of at most `budget` tokens; 0 elsewhere."""
    rows, found = decode_groups(groups, VOCAB, Needs()), engine.backend
    out = np.zeros(len(rows.tokens), np.float32)
    batches = micro_batches(rows, rows.trained(), {}, budget, found.rank_info, found.packs)
    with torch.no_grad():
        for batch, numbers in found.infer(batches, lambda b, o: found.token_logprobs(o, b, 1.0, entropy_gradient=False)[0]):
            out[batch.places] = numbers.numpy()
    return out


def alone(path: Path, groups: list[TrainGroup]) -> np.ndarray:
    """The same of transformers' model, one sequence a forward pass."""
    model, out = Oracle(str(path)).model, []
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        for sample, valid in zip(payload.samples, group.valid, strict=True):
            ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
            with torch.no_grad():
                logp = torch.log_softmax(model(ids[None]).logits[0, len(payload.prompt) - 1 : -1], -1)
            out.append(logp[torch.arange(len(sample.tokens)), ids[len(payload.prompt) :]].numpy() * sample.loss_mask * valid)
    return np.concatenate(out)


@pytest.mark.parametrize("family", sorted(WIDE))
def test_sequences_run_together_have_the_log_probabilities_of_each_alone(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family)
    groups = make_groups(3, (5, 3, 4), longest=24)
    engine = policy_trainer(make_config(str(tmp_path)))
    assert engine.backend.packs == (family in hf_config.PACKED)
    expected = alone(tmp_path, groups)
    assert np.abs(expected).max() > 1
    for budget in (1 << 20, 60):
        assert_close(logprobs(engine, groups, budget), expected, terms=forward_terms(30), scale=LOGITS, what=family)


@pytest.mark.parametrize("family", [*PADDED, "granite", "olmo3", "phi3"])
def test_a_step_is_that_of_a_plain_loop(tmp_path: Path, family: str) -> None:
    """Losses, and the norm of the gradient over all weights."""
    save_model(tmp_path, family)
    config = make_config(str(tmp_path), algorithm=LOSS_TERMS, training={"max_tokens_per_microbatch": 60})
    groups = make_groups(10)
    expected, _ = Oracle(str(tmp_path)).gradients(groups, config)
    got = comparable(run_step(policy_trainer(config), groups))
    assert_metrics({name: got[name] for name in expected}, expected)


def test_padding_is_told_and_counts_in_the_budget(tmp_path: Path) -> None:
    save_model(tmp_path, "lfm2")
    groups = make_groups(3, (5, 3, 4), longest=24)
    engine = policy_trainer(make_config(str(tmp_path)))
    rows = decode_groups(groups, VOCAB, Needs())
    made = list(micro_batches(rows, rows.trained(), {}, 60, engine.backend.rank_info, engine.backend.packs))
    assert sorted(np.concatenate([batch.samples for batch in made])) == np.flatnonzero(rows.trained()).tolist()
    for batch in made:
        (cells,) = batch.packing.rows
        fed = rows.prompt_length[rows.group[batch.samples]] + rows.length[batch.samples] - 1
        assert cells.shape[1] == fed.max() and (batch.attended, batch.attended - batch.padding) == (cells.numel(), fed.sum())
        assert batch.attended <= 60 or len(batch.samples) == 1
    assert len(made) > 2


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_without_a_place_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_next")
    extra = {f"model.layers.0.extra{index}.weight": torch.zeros(1) for index in range(3)}
    changed(tmp_path, lambda tensors: tensors.update(extra, **{"mtp.norm.weight": torch.zeros(1)}))  # which nobody asks for
    with pytest.raises(UserError, match=r"^model\.path: .*: 3 weights have no place in the model: ") as caught:
        policy_trainer(make_config(str(tmp_path)))
    assert all(name in str(caught.value) for name in extra) and "mtp" not in str(caught.value)


def test_weights_that_transformers_holds_under_other_names_are_named(tmp_path: Path) -> None:
    """As a folder of the body alone has them, which transformers reads all the same."""
    save_model(tmp_path, "granite")
    names = load_file(tmp_path / "model.safetensors").keys()
    changed(tmp_path, lambda tensors: [tensors.update({n.removeprefix("model."): tensors.pop(n)}) for n in list(tensors)])
    with pytest.raises(UserError, match=rf"^model\.path: .* holds {len(names)} weights otherwise than the folder") as caught:
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


KNOWN = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma3", "gpt_oss", "deepseek_v3", "glm4_moe"]
STATE_SPACE = ["falcon_h1", "mamba2"]


@pytest.mark.parametrize("family", STATE_SPACE)
def test_layers_that_peft_refuses_are_told(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family)
    with pytest.raises(UserError, match=r"^lora\.target_modules: .*Module 'out_proj' is incompatible with Mamba-based models"):
        policy_trainer(lora_config(str(tmp_path)))


@pytest.mark.parametrize("family", [*KNOWN, *sorted(WIDE)])
def test_trained_with_adapters_it_leaves_with_them_merged(tmp_path: Path, family: str) -> None:
    """What is published is what computes: transformers' model of it has the log-probabilities of the model with adapters."""
    save_model(tmp_path / "before", family)
    targets = ["in_proj"] if family in STATE_SPACE else []
    engine = policy_trainer(lora_config(str(tmp_path / "before"), replace(LORA, target_modules=targets)))
    for seed in range(2):
        run_step(engine, make_groups(seed))
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    save_file(weights(engine), tmp_path / "after" / "model.safetensors", metadata={"format": "pt"})
    groups = make_groups(3)
    before, after = (alone(tmp_path / each, groups) for each in ("before", "after"))
    close = partial(assert_close, terms=forward_terms(20, layers=4), scale=LOGITS, what=family)
    with pytest.raises(AssertionError, match="at most"):
        close(before, after)  # what the adapters learned is more than rounding
    close(logprobs(engine, groups, 60), after)


@pytest.mark.parametrize("family", ["olmo3", "opt", "phi3", "qwen3_next"])
def test_a_critic_has_the_values_of_each_sequence_alone(tmp_path: Path, family: str) -> None:
    if family == "olmo3":
        save_model(tmp_path, family)  # of which transformers has no classifier
        with pytest.raises(UserError, match=r"^critic\.path: .* cannot be loaded: Unrecognized configuration class"):
            critic_trainer(settings(str(tmp_path), algorithm=PPO, critic=str(tmp_path)))
        return
    model = save_classifier(tmp_path, family)
    groups = make_groups(3, (5, 3, 4), longest=24)
    engine = critic_trainer(settings(str(tmp_path), algorithm=PPO, critic=str(tmp_path), max_tokens_per_microbatch=60))
    assert engine.backend.packs == (family in hf_config.PACKED)
    found = engine.values([ValueRequest(group_id=g.group_id, tokens=g.tokens, payload=g.payload) for g in groups])
    for group, values in zip(groups, found, strict=True):
        payload = codec.decode(GroupPayload, group.payload)
        expected = []
        for sample in payload.samples:
            ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
            with torch.no_grad():
                scores = model.score(model.base_model(ids[None]).last_hidden_state)[0, len(payload.prompt) - 1 : -1, 0]
            expected.append(scores.numpy() * sample.loss_mask)
        wanted = np.concatenate(expected)
        assert np.abs(wanted).max() > 0.1
        assert_close(values.values, wanted, terms=forward_terms(30), scale=LOGITS)
