"""Adapters in the training engine: what is trained, what leaves the engine, and what is kept."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from transformers import AutoModelForCausalLM

from runtime import types
from runtime.config import Critic, Lora, Trainer
from runtime.config.checks import semantic_faults
from runtime.errors import UserError
from runtime.models import hf_policy
from runtime.models.adapters import merged
from runtime.models.hf_folder import WeightFiles
from runtime.trainer.megatron.core_checkpoint import CoreCheckpoint
from runtime.trainer.step import policy_trainer
from runtime.types import Logprobs, TrainGroup
from tests.closeness import BFLOAT16, LOGITS, assert_close, forward_terms
from tests.unit.lora_cases import LORA, adapter_tensors, assert_merged, lora_config, saved
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_oracle import Oracle
from tests.unit.training_steps import LOSS_TERMS, assert_metrics, assert_same, comparable, published, run_step, weights

pytestmark = pytest.mark.numeric

ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
STEPS = 3


def peft_model(path: str, adapter: Path, **options: bool):
    """What other programs make of the base and a folder of adapters."""
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"), adapter, **options
    )


class TestStep:
    def test_steps_are_those_of_a_plain_loop_over_pefts_model(self, policy: str, tmp_path: Path):
        config = lora_config(policy, algorithm=LOSS_TERMS, optimizer={"max_grad_norm": 0.5, "weight_decay": 0.1})
        engine = policy_trainer(config)
        oracle = Oracle(policy)
        start = saved(engine, tmp_path / "start") / "adapter"
        oracle.model = peft_model(policy, start, is_trainable=True).double()
        trained = [parameter for parameter in oracle.model.parameters() if parameter.requires_grad]
        adam = torch.optim.AdamW(trained, lr=1e-2, eps=1e-2, weight_decay=0.1)
        for step in range(STEPS):
            groups = make_groups(step)
            got = comparable(run_step(engine, groups))
            expected, _ = oracle.gradients(groups, config)
            assert_metrics({name: got[name] for name in expected}, expected, steps=step + 1)
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
            adam.step()
        merged = dict(oracle.model.merge_and_unload().named_parameters())
        assert_merged(weights(engine), {name: merged[name].detach() for name in weights(engine)}, config, STEPS)

    @pytest.mark.parametrize("targets", [[], ["q_proj", "layers.1.mlp.up_proj"]])
    def test_only_the_adapted_layers_change(self, policy: str, targets: list[str]):
        engine = policy_trainer(lora_config(policy, replace(LORA, target_modules=targets)))
        plain = policy_trainer(make_config(policy))
        adapted = [name for name in weights(plain) if any(name.endswith(f"{target}.weight") for target in targets or ALL)]
        assert {spec.name for spec in engine.backend.tensor_specs()} == {
            f"{name}.lora_{one}" for name in adapted for one in "AB"
        }
        before = weights(plain)
        assert_same(weights(engine), before)  # B begins at 0
        run_step(engine, make_groups(0))
        run_step(engine, make_groups(1))
        changed = {name for name, tensor in weights(engine).items() if not torch.equal(tensor, before[name])}
        assert changed == set(adapted)

    def test_activation_checkpointing_changes_nothing(self, policy: str):
        groups = make_groups(3)
        plain = policy_trainer(lora_config(policy))
        saving = policy_trainer(lora_config(policy, trainer=Trainer(activation_checkpointing=True)))
        for _ in range(2):
            left, right = comparable(run_step(plain, groups)), comparable(run_step(saving, groups))
            assert_metrics(left, right, steps=2)
        assert_merged(weights(saving), weights(plain), plain._config, 2)

    def test_frozen_weights_keep_the_dtype_that_they_came_in(self, policy: str, tmp_path: Path):
        model = hf_policy.load_policy(policy).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "half")
        engine = policy_trainer(lora_config(str(tmp_path / "half"), dtype="bfloat16"))
        exact = policy_trainer(lora_config(str(tmp_path / "half"), dtype="float32"))
        assert {p.dtype for p in engine.backend.model.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert {p.dtype for p in engine.backend.model.parameters() if p.requires_grad} == {torch.float32}
        before = {name: tensor.clone() for name, tensor in weights(engine).items()}
        assert_same(before, {name: p.detach() for name, p in model.named_parameters()})
        for seed in range(2):
            left, right = (comparable(run_step(each, make_groups(seed))) for each in (engine, exact))
            assert left["actor/entropy"] == pytest.approx(right["actor/entropy"], rel=2e-2)
        assert not torch.equal(
            weights(engine)["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
        )

    def test_bfloat16_on_the_wire_rounds_no_more_alone_than_merged(self, policy: str):
        engine = policy_trainer(lora_config(policy))
        for seed in range(4):
            run_step(engine, make_groups(seed))
        exact, adapters = weights(engine), {name: tensor.bfloat16() for name, tensor in published(engine).items()}
        for name, tensor in merged(WeightFiles(policy), adapters):
            # Either factor and the result are rounded once each, the other way the result alone.
            assert_close(tensor.bfloat16(), exact[name].bfloat16(), terms=3, unit=BFLOAT16, what=name)


class TestStart:
    def test_the_seed_alone_decides_it(self, policy: str, tmp_path: Path):
        torch.manual_seed(1)
        first = adapter_tensors(policy_trainer(lora_config(policy)), tmp_path / "first")
        torch.manual_seed(2)
        state = torch.get_rng_state()
        second = adapter_tensors(policy_trainer(lora_config(policy)), tmp_path / "second")
        assert torch.equal(torch.get_rng_state(), state)
        assert_same(first, second)
        other = adapter_tensors(policy_trainer(lora_config(policy, seed=5)), tmp_path / "other")
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        assert not torch.equal(first[name], other[name])
        assert not torch.equal(first[name], first[name.replace("layers.0", "layers.1")])

    @pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "proj", "self_attn"])
    def test_what_is_no_linear_layer_is_refused(self, tmp_path: Path, target: str):
        path = make_policy(tmp_path, tied=False)
        names = ", ".join(ALL)
        with pytest.raises(UserError, match=rf"lora\.target_modules: '{target}' is no linear layer .* among {names}$"):
            policy_trainer(lora_config(path, Lora(target_modules=["q_proj", target])))

    def test_without_the_package(self, policy: str, monkeypatch: pytest.MonkeyPatch):
        message = "lora: needs a package: pip install 'sluice-rl[lora]'"
        config = lora_config(policy)
        assert message not in semantic_faults(config)
        monkeypatch.setattr("runtime.config.checks.importlib.util.find_spec", lambda name: None)
        assert message in semantic_faults(config)
        elsewhere = replace(config, services=replace(config.services, trainer=Trainer(python=sys.executable)))
        assert message not in semantic_faults(elsewhere)
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(UserError, match=r"^lora: needs a package"):
            policy_trainer(elsewhere)


def test_a_critic_cannot_see_what_the_trainer_computes(policy: str):
    fault = "reference.source: adapter_off serves no critic, which algorithm.kl_placement reward needs it to; must be service"
    penalised = {"kl_coefficient": 0.1, "kl_placement": "reward"}
    with_critic = replace(lora_config(policy, mode="adapter_off", algorithm=penalised), critic=Critic())
    assert fault in semantic_faults(with_critic)
    assert fault not in semantic_faults(replace(with_critic, critic=None))
    in_loss = replace(with_critic, algorithm=replace(with_critic.algorithm, kl_placement="loss"))
    assert fault not in semantic_faults(in_loss)


class TestOnDisk:
    def test_next_steps_are_bit_equal(self, policy: str, tmp_path: Path):
        config = lora_config(policy, algorithm=LOSS_TERMS)
        first, second = policy_trainer(config), policy_trainer(replace(config, run=replace(config.run, seed=9)))
        for seed in range(STEPS):
            run_step(first, make_groups(seed))
        folder = saved(first, tmp_path / "save")
        assert {path.name for path in folder.iterdir()} == {
            "adapter",
            "optimizer.safetensors",
            "rng.safetensors",
            "trainer.json",
        }
        run_step(second, make_groups(40))  # a history that the checkpoint must erase
        second.load(str(folder))
        for seed in range(STEPS, 2 * STEPS):
            left, right = run_step(first, make_groups(seed)), run_step(second, make_groups(seed))
            assert left.metrics == right.metrics
        assert_same(weights(first), weights(second))

    def test_peft_and_transformers_load_it(self, policy: str, tmp_path: Path):
        engine = policy_trainer(lora_config(policy))
        for seed in range(2):
            run_step(engine, make_groups(seed))
        folder = saved(engine, tmp_path / "save")
        (tmp_path / "export").mkdir()
        engine.backend.export(tmp_path / "export")
        exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
        assert_same({name: parameter.detach() for name, parameter in exported.items()}, weights(engine))
        tokens = torch.arange(24).view(2, 12)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
        for adapter in (folder / "adapter", tmp_path / "export" / "adapter"):
            opened = peft_model(policy, adapter)
            assert_close(opened(tokens).logits, whole(tokens).logits, terms=forward_terms(12) + 14 * LORA.rank, scale=LOGITS)
            merged = dict(opened.merge_and_unload().named_parameters())
            for name, tensor in weights(engine).items():
                assert_close(merged[name], tensor, terms=LORA.rank + 2, what=name)  # their product, its scale, the sum

    @pytest.mark.parametrize(
        ("wrote", "reads", "message"),
        [
            (None, LORA, r"lora: is set, but checkpoint .*save has no adapters; must be left out"),
            (LORA, None, r'lora: is not set, but checkpoint .*save holds adapters; must be {"rank": 4, "alpha": 12\.0, .*}'),
            (LORA, replace(LORA, rank=8), r"lora\.rank: 8 differs from checkpoint .*save; must be 4"),
            (LORA, replace(LORA, alpha=6.0), r"lora\.alpha: 6\.0 differs from checkpoint .*save; must be 12\.0"),
            (LORA, replace(LORA, target_modules=["q_proj"]), r"lora\.target_modules: \['q_proj'\] differs from .* 'up_proj'"),
        ],
    )
    def test_another_lora_is_refused(self, policy: str, tmp_path: Path, wrote: Lora | None, reads: Lora | None, message: str):
        folder = saved(policy_trainer(lora_config(policy, wrote)), tmp_path / "save")
        engine = policy_trainer(lora_config(policy, reads))
        before = weights(engine)
        with pytest.raises(UserError, match=message) as raised:
            engine.load(str(folder))
        assert "\n" not in str(raised.value)
        assert_same(weights(engine), before)

    def test_adapters_of_another_base_are_refused(self, policy: str, tmp_path: Path):
        engine = policy_trainer(lora_config(policy))
        run_step(engine, make_groups(0))
        folder = saved(engine, tmp_path / "save")
        copy, other = shutil.copytree(policy, tmp_path / "copy"), tmp_path / "other"
        other.mkdir()
        model = hf_policy.load_policy(policy)
        with torch.no_grad():
            model.get_input_embeddings().weight[0, 0] += 1  # which no adapter is on
        model.save_pretrained(other)
        moved, changed = policy_trainer(lora_config(str(copy))), policy_trainer(lora_config(str(other)))
        moved.load(str(folder))
        assert_same(weights(moved), weights(engine))
        before = weights(changed)
        both = [rf"{path} \(fingerprint \w{{16}}\)" for path in (other, policy)]
        with pytest.raises(
            UserError, match=rf"^model\.path: {both[0]} is not .* checkpoint {folder}; their base is {both[1]}$"
        ):
            changed.load(str(folder))
        assert_same(weights(changed), before)
        told = json.loads((folder / "trainer.json").read_text())
        (folder / "trainer.json").write_text(json.dumps({name: told[name] for name in told if name != "base"}))
        changed.load(str(folder))  # of an earlier version, which named none

    def test_a_checkpoint_of_adapters_is_no_model(self, policy: str, tmp_path: Path):
        folder = saved(policy_trainer(lora_config(policy)), tmp_path / "save")
        with pytest.raises(UserError, match=rf"^{folder}: holds only adapters, .*; the run's folder model has them merged$"):
            CoreCheckpoint(folder)


@torch.no_grad()
def with_base_reference(groups: list[TrainGroup], path: str) -> list[TrainGroup]:
    """`groups` with the log-probabilities that the model of folder `path` gives, by stock transformers."""
    oracle, out = Oracle(path), []
    for group in groups:
        values = torch.cat([row.logp for row in oracle.rows([group], 0.8)]).float().numpy()
        out.append(replace(group, reference=types.encode(Logprobs(group_id=group.group_id, values=values))))
    return out


@pytest.mark.parametrize(
    ("algorithm", "epochs"),
    [({"kl_placement": "reward", "kl": "k1"}, 1), ({"kl_placement": "reward", "advantage": "reinforce_plus_plus"}, 1), ({}, 2)],
    ids=["reward", "whole batch", "loss, several updates"],
)
def test_the_reference_is_the_model_with_its_adapters_off(policy: str, algorithm: dict, epochs: int):
    sections = {
        "algorithm": {"kl_coefficient": 0.1, **algorithm},
        "sampling": {"temperature": 0.8},
        "training": {"max_tokens_per_microbatch": 40, "epochs": epochs},
    }
    own = policy_trainer(lora_config(policy, mode="adapter_off", **sections))
    sent = policy_trainer(lora_config(policy, **sections))
    for seed in range(STEPS):
        groups = make_groups(seed)
        # In parts, so that gradients are there already when the adapters go off.
        bare = [[replace(group, reference=None)] for group in groups]
        left = comparable(run_step(own, *bare))
        right = comparable(run_step(sent, *([group] for group in with_base_reference(groups, policy))))
        assert_metrics(left, right, steps=(seed + 1) * epochs)
    assert abs(left["actor/kl"]) > 1e-4
    assert_merged(weights(own), weights(sent), own._config, STEPS * epochs)
