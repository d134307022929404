"""What the training engine refuses: groups, gradients, model folders and options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime import codec
from runtime.config import Trainer
from runtime.errors import InvalidMessage, InvariantViolated, UserError
from runtime.trainer.step import policy_trainer
from runtime.types import GroupPayload, TrainGroup
from tests.unit.training_cases import VOCAB, make_config, make_groups
from tests.unit.training_steps import LOSS_TERMS, run_step


class TestFaults:
    def test_steps_come_in_order(self, policy: str):
        engine = policy_trainer(make_config(policy))
        with pytest.raises(InvariantViolated, match="step 0, but step 2 begins"):
            engine.begin_step(2)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda group: setattr(group, "reference", None), "group 0: has no reference log-probabilities"),
            (lambda group: setattr(group, "rewards", group.rewards[1:]), "group 0: .* 4 samples, with 3 rewards"),
            (lambda group: setattr(group, "payload", b"\x00"), "not a GroupPayload"),
            (lambda group: edit_payload(group, tokens=np.zeros(1, np.int32)), "group 0: its columns have .* entries"),
            (lambda group: edit_tokens(group, VOCAB), rf"token ids outside of 0\.\.{VOCAB - 1}"),
        ],
    )
    def test_malformed_groups_are_refused_whole(self, policy: str, change, message: str):
        engine = policy_trainer(make_config(policy, algorithm=LOSS_TERMS))
        groups = make_groups(0)
        change(groups[0])
        engine.begin_step(0)
        with pytest.raises(InvalidMessage, match=message):
            engine.accumulate(groups)
        engine.accumulate(make_groups(0))
        clean = run_step(policy_trainer(make_config(policy, algorithm=LOSS_TERMS)), make_groups(0))
        assert engine.apply().metrics == clean.metrics

    def test_bad_model_folders(self, policy: str, tmp_path: Path):
        with pytest.raises(UserError, match=r"model\.path: .* no config\.json"):
            policy_trainer(make_config(str(tmp_path)))
        (tmp_path / "config.json").write_bytes((Path(policy) / "config.json").read_bytes())
        with pytest.raises(UserError, match=r"model\.path: .* cannot be loaded: .*safetensors"):
            policy_trainer(make_config(str(tmp_path)))

    def test_a_missing_weight_is_named(self, policy: str, tmp_path: Path):
        from safetensors.torch import load_file, save_file

        (tmp_path / "config.json").write_bytes((Path(policy) / "config.json").read_bytes())
        tensors = load_file(Path(policy) / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"1 weights are wrong \(missing_keys: model\.norm\.weight"):
            policy_trainer(make_config(str(tmp_path)))

    def test_unknown_names_and_impossible_options(self, policy: str):
        with pytest.raises(UserError, match=r"algorithm\.aggregation: unknown name"):
            policy_trainer(make_config(policy, algorithm={"aggregation": "mean"}))
        with pytest.raises(UserError, match=r"services\.trainer\.cpu_offload"):
            policy_trainer(make_config(policy, trainer=Trainer(cpu_offload=True)))


OWN = """
from sluice import LossOutputs, advantage, policy_loss


@policy_loss("{name}", zero_without_advantage=True)
def given(inputs, options):
    loss = -inputs.logp * inputs.advantages
    return {loss}


@advantage("{name}", streamable=True)
def flat(inputs, options):
    return {advantage}
"""


class TestFunctionsOfTheUsers:
    """What would be broadcast, or have no gradient, is refused: it would be trained on, and nothing would say so."""

    @pytest.mark.parametrize(
        ("loss", "fault"),
        [
            ("loss", r"gives Tensor; allowed: LossOutputs"),
            ("LossOutputs(loss.mean())", r"its loss is of shape \[\]; allowed: \[(\d+), \d+\], \[B, T\]"),
            ("LossOutputs(loss.mean(1, keepdim=True))", r"its loss is of shape \[\d+, 1\]; allowed: \[\d+, \d+\]"),
            ("LossOutputs(loss.detach())", r"its loss has no gradient"),
            ("LossOutputs(loss, {'actor/kl': loss.detach()})", r"its metric 'actor/kl' is reported of every loss"),
            ("LossOutputs(loss, {'a/b': 1.0})", r"its metric 'a/b' is float; allowed: \[\d+, \d+\] or \[\d+, 1\]"),
        ],
    )
    def test_what_a_loss_may_not_give(self, policy: str, tmp_path: Path, loss: str, fault: str):
        engine = policy_trainer(make_config(policy, algorithm={"loss": own(tmp_path, loss=loss)}))
        with pytest.raises(UserError, match=rf"^algorithm\.loss: .*own\.py:{tmp_path.name}:? {fault}"):
            run_step(engine, make_groups(0))

    def test_what_an_advantage_may_not_give(self, policy: str, tmp_path: Path):
        engine = policy_trainer(make_config(policy, algorithm={"advantage": own(tmp_path, advantage="inputs.rewards")}))
        fault = rf"^algorithm\.advantage: what .*:{tmp_path.name} gives is of shape \[12\]; allowed: \[12, 1\] or \[12, \d+\]"
        with pytest.raises(UserError, match=fault):
            run_step(engine, make_groups(0))


def own(folder: Path, loss: str = "LossOutputs(loss)", advantage: str = "inputs.rewards[:, None]") -> str:
    path = folder / "own.py"
    path.write_text(OWN.replace("{name}", folder.name).replace("{loss}", loss).replace("{advantage}", advantage))
    return f"{path}:{folder.name}"


def edit_tokens(group: TrainGroup, token: int) -> None:
    edit_payload(group, tokens=np.full_like(codec.decode(GroupPayload, group.payload).tokens, token))


def edit_payload(group: TrainGroup, **fields: np.ndarray) -> None:
    payload = codec.decode(GroupPayload, group.payload)
    for name, array in fields.items():
        setattr(payload, name, array)
    group.payload = codec.encode(payload)
