"""The ranks' parts of a policy, put together as a weight sync has them, are the policy that is exported, in each layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from runtime.cluster.topology import data_leaders
from runtime.config import Lora, Parallel, Trainer
from runtime.models.adapters import UP
from runtime.models.families.adapters import sync_name
from runtime.trainer.step import policy_trainer
from tests.loopback.ranks import run_ranks
from tests.unit.lora_cases import lora_config
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_config, make_groups, make_policy, random_experts
from tests.unit.training_steps import published, run_step

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, and megatron's dimensions; {}: engine torch
    "fsdp 1": (1, {}),
    "fsdp 2": (2, {}),
    "fsdp 4": (4, {}),
    "data 2": (2, {"tensor": 1}),
    "tensor 2, data 2": (4, {"tensor": 2}),
    "tensor 2, pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
    "expert 2, tensor 2": (4, {"tensor": 2, "expert": 2, "sequence": True}),
    "expert 2, data 2": (4, {"expert": 2}),
    "pipeline 2, context 2": (4, {"pipeline": 2, "context": 2}),
}
LORA = Lora(rank=3, alpha=7.5)


def step_and_compare(rank: int, folder: Path, processes: int, dimensions: dict[str, Any], adapted: bool, dtype: str) -> None:
    """Check that the weights sent after a step are the exported ones: of adapters, these, with their scale."""
    trainer = Trainer(processes=processes)
    if dimensions:
        trainer = replace(trainer, engine="megatron", parallel=Parallel(**dimensions))
    make: Any = lora_config if adapted else make_config
    config = make(str(folder / "policy"), **({"lora": LORA} if adapted else {}), trainer=trainer, dtype=dtype)
    engine = policy_trainer(config, rank=rank, world_size=processes, device=torch.device("cpu"))
    leaders, groups = data_leaders(trainer), make_groups(0, (5, 4, 6, 3))
    if (routes := engine.objective.needs.experts) is not None:
        groups = random_experts(groups, routes)
    run_step(engine, groups[leaders.index(rank) :: len(leaders)] if rank in leaders else [])
    found = published(engine)
    engine.export(folder / "export")
    if rank:
        return
    if adapted:
        written = load_file(folder / "export" / "adapter" / "adapter_model.safetensors")
        exported = {sync_name(name): tensor for name, tensor in written.items()}
        exported = {name: tensor * 2.5 if name.endswith(UP) else tensor for name, tensor in exported.items()}
    else:
        exported, before = (load_file(folder / at / "model.safetensors") for at in ("export", "policy"))
        assert any(not torch.equal(found[name].float(), before[name].float()) for name in before)
    assert exported.keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(exported[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize(
    ("layout", "model", "adapted", "dtype"),
    [
        *((layout, "tied", False, "float32") for layout in LAYOUTS if "expert" not in layout),
        *((layout, "experts", False, "float32") for layout in LAYOUTS if "expert" in layout),
        *((layout, "tied", True, "float32") for layout in ("fsdp 4", "tensor 2, pipeline 2")),
        *((layout, "untied", False, "bfloat16") for layout in ("fsdp 2", "tensor 2, pipeline 2")),
    ],
)
def test_the_parts_of_all_ranks_make_the_exported_policy(
    tmp_path: Path, layout: str, model: str, adapted: bool, dtype: str
) -> None:
    processes, dimensions = LAYOUTS[layout]
    if dimensions:
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    if adapted:
        pytest.importorskip("peft", reason="needs PEFT: pip install 'sluice-rl[lora]'")
    if model == "experts":
        save_model(tmp_path / "policy", "glm4_moe")
        (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    else:
        make_policy(tmp_path / "policy", tied=model == "tied")
    run_ranks(step_and_compare, tmp_path, processes, processes, dimensions, adapted, dtype)
