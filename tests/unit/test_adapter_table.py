"""Which adapters the ranks of a layout hold, by names and shapes, and what they take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from runtime.errors import UserError
from runtime.models.families import Layout, family_for
from runtime.models.families.adapters import PREFIX, AdapterTable, target_modules
from runtime.models.families.memory import ModelWork, rank_bytes
from tests.unit.config_cases import EXPERTS, MODEL

DENSE = family_for(MODEL)  # 6 layers, 48 wide, 12 heads of 4 and 4 of keys, an MLP of 40
SPARSE = family_for(MODEL | EXPERTS)  # 4 experts of 8
RANK = 3


def shapes(family: Any, targets: list[str], layout: Layout, **coordinates: int) -> dict[str, tuple[int, ...]]:
    found = AdapterTable(family, RANK, targets, layout).parameters(layout, **coordinates)
    return {
        each.name.removeprefix("decoder.layers.0."): each.shape for each in found if each.name.startswith("decoder.layers.0.")
    }


def test_all_layers_but_routers_embedding_and_head() -> None:
    table = AdapterTable(SPARSE, RANK, [], Layout())
    assert table.targets == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    found = table.tensors()
    assert len(found) == 2 * 6 * (4 + 3 * 4)
    assert found[f"{PREFIX}model.layers.5.mlp.experts.3.down_proj.lora_A.weight"] == (RANK, 8)
    assert found[f"{PREFIX}model.layers.0.self_attn.k_proj.lora_B.weight"] == (16, RANK)


def test_a_rank_has_all_of_what_it_shares_and_a_part_of_what_is_cut() -> None:
    assert shapes(DENSE, ["v_proj", "q_proj", "down_proj"], Layout(tensor=2), tensor_rank=1) == {
        "self_attention.linear_qkv.adapter.down.0": (RANK, 48),
        "self_attention.linear_qkv.adapter.up.0": (24, RANK),
        "self_attention.linear_qkv.adapter.down.2": (RANK, 48),
        "self_attention.linear_qkv.adapter.up.2": (8, RANK),
        "mlp.linear_fc2.adapter.down.0": (RANK, 20),
        "mlp.linear_fc2.adapter.up.0": (48, RANK),
    }


def test_experts_have_their_own() -> None:
    found = AdapterTable(SPARSE, RANK, ["up_proj"], Layout()).parameters(Layout(expert=2), expert_rank=1)
    assert all(each.expert for each in found)
    names = [name.removeprefix(f"{PREFIX}model.layers.0.mlp.experts.") for each in found[:4] for name in [each.sources[0].name]]
    assert names == [f"{expert}.up_proj.lora_{part}.weight" for expert in (2, 3) for part in "AB"]


def test_the_pieces_of_the_ranks_make_the_whole() -> None:
    layout, torch_generator = Layout(tensor=2), torch.Generator().manual_seed(0)
    ranks = [AdapterTable(DENSE, RANK, [], Layout()).parameters(layout, tensor_rank=rank) for rank in range(2)]
    for pieces in zip(*ranks, strict=True):
        (source,) = pieces[0].sources
        whole = torch.randn(source.shape, generator=torch_generator)
        held = [each.from_hf({source.name: whole}.__getitem__) for each in pieces]
        ((name, found),) = pieces[0].to_hf(held[: pieces[0].pieces])
        assert name == source.name and torch.equal(found, whole)


def test_targets_are_names_or_their_ends() -> None:
    layers = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.gate", "model.layers.0.router"]
    assert target_modules(layers, []) == ["up_proj"]
    assert target_modules(layers, ["gate", "layers.1.mlp.up_proj"]) == ["gate", "layers.1.mlp.up_proj"]
    with pytest.raises(UserError, match=r"lora\.target_modules: 'p_proj' is no linear .* must be among gate, router, up_proj$"):
        target_modules(layers, ["p_proj"])
    table = AdapterTable(DENSE, RANK, ["layers.1.mlp.up_proj"], Layout())
    assert list(table.tensors()) == [f"{PREFIX}model.layers.1.mlp.up_proj.lora_{part}.weight" for part in "AB"]


def test_a_layout_is_refused_that_leaves_ranks_without() -> None:
    AdapterTable(DENSE, RANK, [], Layout(tensor=2, pipeline=3))
    with pytest.raises(UserError, match=r"\['layers\.0\.mlp\.up_proj'\] leaves ranks of pipeline stage 1 with fewer adapters"):
        AdapterTable(DENSE, RANK, ["layers.0.mlp.up_proj"], Layout(pipeline=2))
    with pytest.raises(UserError, match="leaves ranks of pipeline stage 0 with fewer adapters"):
        AdapterTable(SPARSE, RANK, ["q_proj", "experts.3.up_proj"], Layout(expert=2))


@pytest.mark.parametrize("width", [2, 4])
def test_memory_for_what_is_trained(width: int) -> None:
    """Of a pipeline stage of three layers, in float32: the adapters, their gradients, and two moments over the two blocks."""
    work, layout = ModelWork(ranks=4, tokens=64, width=width), Layout(pipeline=2)
    plain, adapted = rank_bytes(DENSE, layout, work), rank_bytes(DENSE, layout, work, AdapterTable(DENSE, RANK, [], Layout()))
    sizes = [(48, 48), (16, 48), (16, 48), (48, 48), (40, 48), (40, 48), (48, 40)]
    adapters = 3 * RANK * sum(map(sum, sizes))
    assert adapted.weights == plain.weights + 4 * adapters
    assert (adapted.gradients, adapted.optimizer) == (4 * adapters, 8 * adapters // 2)
    assert adapted.activations == plain.activations
    assert math.isclose(plain.gradients, 4 * plain.weights / width)
