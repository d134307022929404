"""What is refused of a trainer, critic or reference on megatron-core, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.cluster.topology import data_leaders
from runtime.config import Config, Trainer, model_checks
from runtime.config.checks import semantic_faults
from runtime.config.loading import load
from runtime.config.model_checks import megatron_faults

MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
PROCESSES = "services.trainer.processes"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    monkeypatch.setattr(model_checks, "_version", lambda: "0.16.1")


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
        (24, {"tensor": 2, "pipeline": 2, "context": 3}),
        (24, {"tensor": 2, "pipeline": 2, "context": 3, "data": 2}),
        (4, {"pipeline": 4, "layers_per_stage": [1, 2, 2, 1]}),
        (2, {"pipeline": 2, "layers_per_stage": [2, 4]}),
    ],
)
def test_layouts_that_divide(processes: int, parallel: dict[str, Any]) -> None:
    assert faults(**services(processes, **parallel)) == []


@pytest.mark.parametrize(
    ("processes", "parallel", "fault"),
    [
        (3, {"tensor": 2}, f"{PROCESSES}: 3 is not a multiple of parallel.tensor 2 x context 1 x pipeline 1"),
        (2, {"context": 2, "pipeline": 2}, f"{PROCESSES}: 2 is not a multiple of parallel.tensor 1 x context 2 x pipeline 2"),
        (
            4,
            {"tensor": 2, "data": 3},
            f"{PROCESSES}: 4 is not parallel.tensor 2 x context 1 x pipeline 1 x data 3; must be 6, or left out",
        ),
        (1, {"sequence": True}, "services.trainer.parallel.sequence: true needs parallel.tensor > 1"),
        (4, {"pipeline": 4}, "services.trainer.parallel: pipeline parallel is 4; must divide the layers (6)"),
        (8, {"tensor": 8}, "services.trainer.parallel: tensor parallel is 8; must divide attention heads (12)"),
        (
            2,
            {"pipeline": 2, "layers_per_stage": [2, 3]},
            "services.trainer.parallel: layers per stage are 2,3; must be positive and add up to the layers (6)",
        ),
        (
            4,
            {"pipeline": 4, "layers_per_stage": [1, 1, 3, 1]},
            "services.trainer.parallel.layers_per_stage: [1, 1, 3, 1]: all but the first and the last number must be equal",
        ),
    ],
)
def test_layouts_that_do_not(processes: int, parallel: dict[str, Any], fault: str) -> None:
    assert faults(**services(processes, **parallel))[0].startswith(fault)


def test_an_older_version_does_not_cut_up_a_tied_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tied, cut = MODEL | {"tie_word_embeddings": True}, services(2, pipeline=2)
    assert faults(tied, **cut) == []
    monkeypatch.setattr(model_checks, "_version", lambda: "0.12.1")
    (fault,) = faults(tied, **cut)
    assert fault.startswith("services.trainer.parallel.pipeline: 2: megatron-core 0.12.1 cannot cut up a model whose head")
    assert faults(**cut) == []
    assert faults(tied, "critic", critic={}, **services(2, "critic", pipeline=2)) == []
    cut["services"]["trainer"]["python"] = "/other/python"  # which has another version, perhaps
    assert faults(tied, **cut) == []


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [(1, {}), (8, {"expert": 2}), (4, {"expert": 4}), (16, {"tensor": 2, "pipeline": 2, "expert": 4, "sequence": True})],
)
def test_layouts_of_experts_that_divide(processes: int, parallel: dict[str, Any]) -> None:
    assert faults(MODEL | EXPERTS, **services(processes, **parallel)) == []


@pytest.mark.parametrize(
    ("processes", "parallel", "fault"),
    [
        (
            4,
            {"tensor": 2, "expert": 4, "sequence": True},
            "services.trainer.parallel.expert: 4 does not divide the ranks that hold the same part of the model, of which 4 "
            "processes of parallel.tensor 2 x pipeline 1 make 2",
        ),
        (3, {"expert": 3}, "services.trainer.parallel: expert parallel is 3; must divide the experts of a layer (4)"),
        (2, {"tensor": 2}, "services.trainer.parallel.sequence: must be true for a mixture of experts with parallel.tensor 2"),
    ],
)
def test_layouts_of_experts_that_do_not(processes: int, parallel: dict[str, Any], fault: str) -> None:
    assert faults(MODEL | EXPERTS, **services(processes, **parallel)) == [fault]


def test_a_dense_model_has_no_experts_to_spread() -> None:
    (fault,) = faults(**services(2, expert=2))
    assert fault == "services.trainer.parallel: expert parallel is 2; must be 1 for a model without experts"


def test_the_critics_model_is_its_own() -> None:
    found = faults(MODEL | {"num_key_value_heads": 3}, "critic", critic={}, **services(4, "critic", tensor=4))
    assert found == ["services.critic.parallel: tensor parallel is 4; must divide key-value heads (3)"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"engine": "megatron", "processes": 4, "parallel": {"tensor": 4}}, None),
        (
            {"engine": "megatron", "processes": 8, "parallel": {"tensor": 8}},
            "services.reference.parallel: tensor parallel is 8; must divide attention heads (12)",
        ),
        (
            {"engine": "megatron", "replicas": 2},
            "services.reference.replicas: 2 is for engine torch; engine megatron takes processes",
        ),
        ({"processes": 2}, "services.reference.processes: 2 is for engine megatron; engine torch takes replicas"),
        (
            {"parallel": {"tensor": 2}},
            "services.reference.parallel: is for engine megatron; engine torch has one process a replica",
        ),
        (
            {"backend": "gloo"},
            "services.reference.backend: gloo is for engine megatron; engine torch has one process a replica",
        ),
    ],
)
def test_the_reference_is_spread_or_has_replicas(tmp_path: Path, settings: dict[str, Any], fault: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def told(**sections: Any) -> list[str]:
        sections = {"run": {"name": "a"}, "model": {"path": str(tmp_path)}, "services": {"reference": settings}, **sections}
        return [each for each in semantic_faults(msgspec.convert(sections, Config)) if each.startswith("services.reference")]

    found = told(algorithm={"kl_coefficient": 0.1})
    assert (found[0].startswith(fault) if fault else not found) and len(found) <= 2


def test_the_warm_ups_model_is_checked_too() -> None:
    config = msgspec.convert({"run": {"name": "test"}, "warmup": {"layers": 3}, **services(2, pipeline=2)}, Config)
    told = [fault for fault in semantic_faults(config) if fault.startswith("services")]
    assert told == ["services.trainer.parallel: pipeline parallel is 2; must divide the layers (3), or give layers per stage"]


def test_what_it_does_not_do() -> None:
    whole = services(2, tensor=2)
    (fault,) = faults(services={"trainer": whole["services"]["trainer"] | {"cpu_offload": True}})
    assert fault == "services.trainer.cpu_offload: is engine torch's; must be false for engine megatron"
    (fault,) = faults(training={"optimizer": {"name": "muon"}}, **whole)
    assert fault == "training.optimizer.name: muon is engine torch's; must be adamw for engine megatron"
    own = {"critic": {"optimizer": {"name": "adamw_8bit"}}, "services": {"critic": whole["services"]["trainer"]}}
    (fault,) = faults(role="critic", **own)
    assert fault == "critic.optimizer.name: adamw_8bit is engine torch's; must be adamw for engine megatron"
    (fault,) = faults(MODEL | {"model_type": "deepseek_v2"}, **whole)
    assert "model_type 'deepseek_v2' has no mapping to megatron-core" in fault
    (fault,) = faults(services={"trainer": {"processes": 2, "parallel": {"tensor": 2}}})
    assert fault.startswith("services.trainer.parallel: is for engine megatron")


@pytest.mark.parametrize(
    ("targets", "layout", "fault"),
    [
        ([], {"tensor": 2}, ""),
        (["q_proj", "layers.4.mlp.up_proj"], {"pipeline": 2}, ""),
        (
            ["query"],
            {"tensor": 2},
            "lora.target_modules: 'query' is no linear layer of the model; must be among down_proj, gate_",
        ),
        (
            ["layers.4.mlp.up_proj"],
            {"pipeline": 2},
            "lora.target_modules: ['layers.4.mlp.up_proj'] leaves ranks of pipeline stage 0",
        ),
    ],
)
def test_every_rank_has_adapters(targets: list[str], layout: dict[str, Any], fault: str) -> None:
    found = faults(lora={"target_modules": targets}, **services(2, **layout))
    assert [fault] == [each[: len(fault)] for each in found] if fault else not found
    assert not faults(role="critic", lora={"target_modules": targets}, **services(2, "critic", **layout))


def test_all_experts_have_adapters_or_none() -> None:
    spread = services(2, expert=2)
    assert not faults(MODEL | EXPERTS, lora={"target_modules": ["mlp.experts.0.up_proj", "mlp.experts.2.up_proj"]}, **spread)
    (fault,) = faults(MODEL | EXPERTS, lora={"target_modules": ["q_proj", "mlp.experts.0.up_proj"]}, **spread)
    assert fault.startswith(
        "lora.target_modules: ['mlp.experts.0.up_proj', 'q_proj'] leaves ranks of pipeline stage 0 with fewer"
    )


def test_what_is_for_it_alone() -> None:
    away = {"offload_train_grad": True, "offload_train_param": True}
    asked = {"services": {"trainer": {"overlap": False, **away}}, "checkpoint": {"async_save": True}}
    assert [fault.partition(": ")[0] for fault in faults(**asked)] == [
        "checkpoint.async_save",
        "services.trainer.overlap",
    ]
    asked["services"]["trainer"]["engine"] = "megatron"
    assert faults(**asked) == []
    for engine in ("torch", "megatron"):
        (fault,) = faults(role="critic", critic={}, services={"critic": {"engine": engine, **away}})
        assert fault.startswith("services.critic.offload_train_param: true leaves it no weights to compute values with")
    there = [f"services.trainer.offload_train_{kind}" for kind in ("grad", "param")]
    found = faults(services={"trainer": {"cpu_offload": True, **away}})
    assert [fault.partition(":")[0] for fault in found] == there


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_installed", lambda: False)
    (fault,) = faults(**services(1))
    assert fault == "services.trainer.engine: megatron needs a package: pip install 'sluice-rl[megatron]'"
    elsewhere = services(1)
    elsewhere["services"]["platform"] = "ascend"
    (fault,) = faults(**elsewhere)
    assert fault == "services.trainer.engine: megatron needs Megatron-LM and MindSpeed: install them (docs/guides/ascend.md)"
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
    assert leaders(processes=16, parallel={"tensor": 2, "context": 2, "pipeline": 2}) == [0, 4]


def test_processes_that_are_left_out_are_as_many_as_the_layout_has_places(tmp_path: Path) -> None:
    def processes(trainer: str, *overrides: str) -> list[int]:
        file = tmp_path / "config.yaml"
        file.write_text(f"{{run: {{name: a}}, services: {{trainer: {{{trainer}}}, critic: {{engine: megatron}}}}}}")
        services = load(file, overrides).services
        return [services.trainer.processes, services.critic.processes]

    assert processes("engine: megatron, parallel: {tensor: 2, context: 3, pipeline: 2}") == [12, 1]
    assert processes("engine: megatron, parallel: {tensor: 2}", "services.trainer.parallel.data=4") == [8, 1]
    assert processes("engine: megatron, parallel: {tensor: 2}", "services.critic.parallel.tensor=2") == [2, 2]
    assert processes("engine: megatron, processes: 8, parallel: {tensor: 2}") == [8, 1]
    assert processes("engine: torch, parallel: {tensor: 2}") == [1, 1]
