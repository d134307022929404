"""LoRA adapters: what a layout's ranks hold, what travels, and what is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import InvalidMessage, UserError
from runtime.models import hf_policy
from runtime.models.adapters import merged, require_base
from runtime.models.families import Layout, family_for
from runtime.models.families.adapters import PREFIX, AdapterTable, target_modules
from runtime.models.families.memory import ModelWork, rank_bytes
from runtime.models.hf_folder import WeightFiles, fingerprint
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import PolicyVersion
from tests.closeness import assert_close
from tests.unit.config_cases import EXPERTS, MODEL
from tests.unit.test_quantized import quantised
from tests.unit.tiny_models import save_model
from tests.unit.training_steps import assert_same

# ----
# Adapters as they travel: what rollouts make of them, what is refused, which base is theirs, and how many bytes they are.

RANK = 3
ADAPTED = "model.layers.1.self_attn.o_proj.weight"


def pair(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {".lora_A": (RANK, shape[1]), ".lora_B": (shape[0], RANK)}
    return {f"{ADAPTED}{end}": torch.randn(size, generator=generator).to(dtype) for end, size in sizes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("save", [save_model, quantised], ids=["plain", "float8"])
def test_the_adapted_matrix_is_the_sum_and_all_else_is_the_folders(
    tmp_path: Path, save: Callable[[Path, str], object], dtype: torch.dtype
) -> None:
    save(tmp_path, "qwen3")
    base = {name: tensor.clone() for name, tensor in WeightFiles(tmp_path)}
    adapters = pair(tuple(base[ADAPTED].shape), dtype)
    found = dict(merged(WeightFiles(tmp_path), adapters))
    assert found.keys() == base.keys()
    up, down = (adapters[f"{ADAPTED}{end}"].double() for end in (".lora_B", ".lora_A"))
    assert_close(found.pop(ADAPTED), base.pop(ADAPTED).double() + up @ down, terms=RANK + 1)  # a sum of so many, and W
    assert all(torch.equal(found[name], tensor) for name, tensor in base.items())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({".lora_A": None}, r"is \[32, 32\], B \[32, 3\] and A \[\]"),
        ({".lora_B": torch.zeros(32, RANK + 1)}, r"is \[32, 32\], B \[32, 4\] and A \[3, 32\]"),
        ({".lora_B": torch.zeros(31, RANK)}, r"is \[32, 32\], B \[31, 3\] and A \[3, 32\]"),
        ({".lora_A": torch.zeros(RANK, 8, 4)}, r"is \[32, 32\], B \[32, 3\] and A \[3, 8, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(
    tmp_path: Path, change: dict[str, torch.Tensor | None], told: str
) -> None:
    save_model(tmp_path)
    adapters = pair((32, 32)) | {f"{ADAPTED}{end}": tensor for end, tensor in change.items()}
    given = {name: tensor for name, tensor in adapters.items() if tensor is not None}
    with pytest.raises(InvalidMessage, match=f"^adapters do not fit the model: {ADAPTED} {told}$"):
        next(merged(WeightFiles(tmp_path), given))
    elsewhere = {name.replace("o_proj", "z_proj"): tensor for name, tensor in pair((32, 32)).items()}
    with pytest.raises(InvalidMessage, match=r"z_proj\.weight is \[\], B"):
        next(merged(WeightFiles(tmp_path), elsewhere))


def test_a_base_is_known_by_its_weights_however_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(hf_policy, "SHARD_BYTES", 4096)
    hf_policy.write_model(tmp_path / "parts", tensors, tensors.items(), 0, torch.float32, str(tmp_path / "one"))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    known = fingerprint(tmp_path / "one")
    require_base(known, str(tmp_path / "parts"))
    for index, name in enumerate(tensors):
        (tmp_path / str(index)).mkdir()
        save_file({**tensors, name: tensors[name] + 0.25}, tmp_path / str(index) / "model.safetensors")
        with pytest.raises(UserError, match=rf"^model\.path: '{tmp_path / str(index)}' has other weights here .*{known}\)$"):
            require_base(known, str(tmp_path / str(index)))


def test_the_engine_keeps_what_it_has_until_the_swap_and_alternates_between_two_sets(tmp_path: Path) -> None:
    save_model(tmp_path)
    engine = TorchRolloutEngine(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, slots=1, max_model_len=16)

    def held() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in engine._decoder.weights._views.items()}

    async def course() -> None:
        places, before = set(), held()
        for step in range(1, 5):
            adapters = {name: tensor * step for name, tensor in pair((32, 32)).items()}
            await engine.stage({name: tensor * 9 for name, tensor in adapters.items()})  # and withdrawn
            await engine.stage(adapters)
            assert_same(held(), before)
            await engine.swap(PolicyVersion(0, step))
            before = dict(merged(WeightFiles(tmp_path), adapters))
            assert_same(held(), before)
            places.add(engine._decoder.weights.layers[1].output.data_ptr())
        assert len(places) == 2
        await engine.close()

    asyncio.run(course())


# ---- Which adapters the ranks of a layout hold, by names and shapes, and what they take

DENSE = family_for(MODEL)  # 6 layers, 48 wide, 12 heads of 4 and 4 of keys, an MLP of 40
SPARSE = family_for(MODEL | EXPERTS)  # 4 experts of 8


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


def test_a_rank_has_a_part_of_what_is_cut_and_experts_have_their_own() -> None:
    assert shapes(DENSE, ["v_proj", "q_proj", "down_proj"], Layout(tensor=2), tensor_rank=1) == {
        "self_attention.linear_qkv.adapter.down.0": (RANK, 48),
        "self_attention.linear_qkv.adapter.up.0": (24, RANK),
        "self_attention.linear_qkv.adapter.down.2": (RANK, 48),
        "self_attention.linear_qkv.adapter.up.2": (8, RANK),
        "mlp.linear_fc2.adapter.down.0": (RANK, 20),
        "mlp.linear_fc2.adapter.up.0": (48, RANK),
    }
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
