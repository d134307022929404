"""What is refused of a trainer or critic on megatron-core, before anything is started."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime import config_checks_megatron
from runtime.config import Config, Trainer
from runtime.config_checks import semantic_faults
from runtime.config_checks_megatron import megatron_faults
from runtime.topology import data_leaders

MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks_megatron, "_installed", lambda: True)


def faults(model: dict[str, Any] | None = MODEL, role: str = "trainer", **sections: Any) -> list[str]:
    config = msgspec.convert({"run": {"name": "test"}, **sections}, Config)
    return list(megatron_faults(config, {role: model}))


def services(processes: int, role: str = "trainer", **parallel: Any) -> dict[str, Any]:
    return {"services": {role: {"engine": "megatron", "processes": processes, "parallel": parallel}}}


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (1, {}),
        (8, {}),
        (2, {"tensor": 2, "sequence": True}),
        (12, {"tensor": 4, "pipeline": 3}),
        (24, {"tensor": 2, "pipeline": 6}),
    ],
)
def test_layouts_that_divide(processes: int, parallel: dict[str, Any]) -> None:
    assert faults(**services(processes, **parallel)) == []


@pytest.mark.parametrize(
    ("processes", "parallel", "fault"),
    [
        (3, {"tensor": 2}, "services.trainer.processes: 3 is not a multiple of parallel.tensor 2 x pipeline 1"),
        (2, {"tensor": 2, "pipeline": 2}, "services.trainer.processes: 2 is not a multiple of parallel.tensor 2 x pipeline 2"),
        (1, {"sequence": True}, "services.trainer.parallel.sequence: true needs parallel.tensor > 1"),
        (4, {"pipeline": 4}, "services.trainer.parallel: pipeline parallel is 4; must divide the layers (6)"),
        (8, {"tensor": 8}, "services.trainer.parallel: tensor parallel is 8; must divide attention heads (12)"),
    ],
)
def test_layouts_that_do_not(processes: int, parallel: dict[str, Any], fault: str) -> None:
    assert faults(**services(processes, **parallel))[0].startswith(fault)


def test_the_critics_model_is_its_own() -> None:
    found = faults(MODEL | {"num_key_value_heads": 3}, "critic", critic={}, **services(4, "critic", tensor=4))
    assert found == ["services.critic.parallel: tensor parallel is 4; must divide key-value heads (3)"]


def test_the_warm_ups_model_is_checked_too() -> None:
    config = msgspec.convert({"run": {"name": "test"}, "warmup": {"layers": 3}, **services(2, pipeline=2)}, Config)
    told = [fault for fault in semantic_faults(config) if fault.startswith("services")]
    assert told == ["services.trainer.parallel: pipeline parallel is 2; must divide the layers (3), or give layers per stage"]


def test_what_it_does_not_do() -> None:
    whole = services(2, tensor=2)
    assert faults(lora={}, **whole) == ["lora: engine megatron trains whole models; take services.trainer.engine torch"]
    (fault,) = faults(services={"trainer": whole["services"]["trainer"] | {"cpu_offload": True}})
    assert fault == "services.trainer.cpu_offload: is engine torch's; must be false for engine megatron"
    (fault,) = faults(MODEL | EXPERTS, **whole)
    assert fault == "services.trainer.engine: megatron trains no mixture of experts yet; the model is of type qwen3_moe"
    (fault,) = faults(MODEL | {"model_type": "deepseek_v3"}, **whole)
    assert "multi-head latent attention" in fault
    (fault,) = faults(services={"trainer": {"processes": 2, "parallel": {"tensor": 2}}})
    assert fault.startswith("services.trainer.parallel: is for engine megatron")


def test_what_is_for_it_alone() -> None:
    away = {"offload_train_grad": True, "offload_train_param": True}
    asked = {"services": {"trainer": {"overlap": False, **away}}, "checkpoint": {"async_save": True}}
    assert [fault.partition(": ")[0] for fault in faults(**asked)] == [
        "checkpoint.async_save",
        "services.trainer.overlap",
        "services.trainer.offload_train_grad",
        "services.trainer.offload_train_param",
    ]
    asked["services"]["trainer"]["engine"] = "megatron"
    assert faults(**asked) == []
    (fault,) = faults(role="critic", critic={}, services={"critic": {"engine": "megatron", **away}})
    assert fault.startswith("services.critic.offload_train_param: true leaves it no weights to compute values with")


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks_megatron, "_installed", lambda: False)
    (fault,) = faults(**services(1))
    assert fault == "services.trainer.engine: megatron needs a package: pip install 'sluice-rl[megatron]'"
    elsewhere = services(1)
    elsewhere["services"]["trainer"]["python"] = "/other/python"  # whose packages are not this process's
    assert faults(**elsewhere) == []


def test_the_first_rank_of_each_block_is_given_data() -> None:
    def leaders(**settings: Any) -> list[int]:
        return list(data_leaders(msgspec.convert(settings, Trainer)))

    assert leaders() == [0]
    assert leaders(processes=3) == [0, 1, 2]
    assert leaders(processes=2, parallel={"tensor": 2}) == [0]
    assert leaders(processes=8, parallel={"tensor": 2, "pipeline": 2}) == [0, 2]
    assert leaders(processes=6, parallel={"pipeline": 2}) == [0, 1, 2]
