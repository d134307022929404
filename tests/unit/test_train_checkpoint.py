"""What the training engine writes: checkpoints that go on bit for bit, and exports for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.errors import UserError
from runtime.trainer.step import policy_trainer
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import LOSS_TERMS, assert_same, run_step, weights

pytestmark = pytest.mark.numeric


class TestCheckpoint:
    def test_next_steps_are_bit_equal(self, policy: str, tmp_path: Path):
        schedule = {"schedule": "cosine", "warmup_steps": 2}
        config = make_config(policy, algorithm=LOSS_TERMS, optimizer=schedule, training={"steps": 9})
        first = policy_trainer(config)
        for seed in range(3):
            run_step(first, make_groups(seed))
        first.save(str(tmp_path))
        second = policy_trainer(config)
        run_step(second, make_groups(40))  # a history that the checkpoint must erase
        torch.manual_seed(99)
        generator = torch.get_rng_state()
        second.load(str(tmp_path))
        assert second.step == 3
        assert not torch.equal(torch.get_rng_state(), generator)
        for seed in range(3, 6):
            left, right = run_step(first, make_groups(seed)), run_step(second, make_groups(seed))
            assert left.metrics == right.metrics
        assert_same(weights(first), weights(second))

    def test_before_the_first_step(self, policy: str, tmp_path: Path):
        config = make_config(policy)
        first, second = policy_trainer(config), policy_trainer(config)
        first.save(str(tmp_path))
        run_step(second, make_groups(0))
        second.load(str(tmp_path))
        assert run_step(first, make_groups(1)).metrics == run_step(second, make_groups(1)).metrics
        assert_same(weights(first), weights(second))

    def test_holds_no_pickle_and_splits_large_files(self, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("runtime.models.hf_policy.SHARD_BYTES", 20_000)
        engine = policy_trainer(make_config(policy))
        run_step(engine, make_groups(0))
        engine.save(str(tmp_path))
        kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert kinds == {".json", ".safetensors"}
        assert len(list(tmp_path.glob("optimizer-*.safetensors"))) > 1
        other = policy_trainer(make_config(policy))
        other.load(str(tmp_path))
        assert_same(weights(other), weights(engine))

    def test_of_another_engine_is_refused(self, policy: str, tmp_path: Path):
        (tmp_path / "trainer.json").write_text('{"format": 1, "engine": "megatron", "step": 2}')
        with pytest.raises(UserError, match="is of engine megatron"):
            policy_trainer(make_config(policy)).load(str(tmp_path))

    def test_of_another_model_is_refused(self, policy: str, tmp_path: Path):
        (tmp_path / "other").mkdir()
        (tmp_path / "save").mkdir()
        policy_trainer(make_config(make_policy(tmp_path / "other", tied=False))).save(str(tmp_path / "save"))
        engine = policy_trainer(make_config(policy))
        before = weights(engine)
        with pytest.raises(UserError, match=r"another model; 1 tensors differ, such as lm_head\.weight"):
            engine.load(str(tmp_path / "save"))
        assert_same(weights(engine), before)
        with pytest.raises(UserError, match=r"trainer\.json: cannot be read"):
            engine.load(str(tmp_path / "other"))


@pytest.mark.parametrize("tied", [True, False])
def test_export_is_a_hugging_face_folder(tmp_path: Path, tied: bool):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    (tmp_path / "policy").mkdir()
    (tmp_path / "export").mkdir()
    path = make_policy(tmp_path / "policy", tied=tied)
    engine = policy_trainer(make_config(path))
    run_step(engine, make_groups(0))
    engine.backend.export(tmp_path / "export")
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == (tmp_path / "policy" / "tokenizer.json").read_bytes()
    names = load_file(tmp_path / "export" / "model.safetensors").keys()
    assert (
        names
        == load_file(tmp_path / "policy" / "model.safetensors").keys()
        == {spec.name for spec in engine.backend.tensor_specs()}
    )
    assert ("lm_head.weight" in names) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_same({name: tensor.detach() for name, tensor in model.named_parameters()}, weights(engine))
