"""Weights quantised by blocks are read as what they stand for, a tensor at a time, by every reader; other kinds are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.conversion import conversion
from runtime.errors import UserError
from runtime.models import hf_policy
from runtime.models.families import Layout
from runtime.models.hf_folder import WeightFiles
from runtime.models.quantized import Dequantized, blocks_of
from runtime.rollout.torch.decoder import Decoder
from tests.unit.test_decoder import whole_logits
from tests.unit.tiny_models import save_model

BLOCKS = (16, 12)  # neither divides all sizes
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCKS)}
LARGEST = 448.0  # of e4m3
TOKENS = torch.arange(12).view(1, -1)
NAME = "model.layers.1.self_attn.kv_b_proj.weight"


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """To the nearest e4m3, and its scales."""
    rows, columns = (range(0, size, block) for size, block in zip(weight.shape, BLOCKS, strict=True))
    scales = torch.empty(len(rows), len(columns))
    stored = torch.empty(weight.shape)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = weight[row : row + BLOCKS[0], column : column + BLOCKS[1]]
            scales[i, j] = block.abs().max() / LARGEST
            stored[row : row + BLOCKS[0], column : column + BLOCKS[1]] = block / scales[i, j]
    return stored.to(torch.float8_e4m3fn), scales


def stands_for(stored: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Element by element, in float64."""
    values, factors = stored.double().numpy(), scales.double().numpy()
    return np.array(
        [[value * factors[i // BLOCKS[0], j // BLOCKS[1]] for j, value in enumerate(row)] for i, row in enumerate(values)]
    )


def quantised(folder: Path, name: str = "deepseek_v3", **save: Any) -> dict[str, torch.Tensor]:
    """A model's folder, its projections quantised; what they stand for, and the others, float32."""
    save_model(folder, name)
    tensors = load_file(folder / "model.safetensors")
    whole = dict(tensors)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        tensors[key], tensors[f"{key}_scale_inv"] = quantise(tensors[key])
        whole[key] = torch.from_numpy(stands_for(tensors[key], tensors[f"{key}_scale_inv"])).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, quantization_config=FP8)
    return whole


def same(found: Iterable[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    left = dict(found)
    assert left.keys() == expected.keys()
    for name, tensor in left.items():
        # The product of two float32 of 4 and 24 bits is rounded once.
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-23, atol=0, msg=name)


def test_every_tensor_and_every_part_is_what_it_stands_for(tmp_path: Path) -> None:
    """In one file, or with scales in another."""
    expected = quantised(tmp_path)
    files = WeightFiles(tmp_path)
    same(files, expected)
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    with files.slices() as read:
        for index in (slice(3, 40), slice(0, 0), (slice(0, 17), slice(5, 13)), (slice(None), slice(15, 16))):
            torch.testing.assert_close(read(NAME)[index], expected[NAME][index], rtol=2**-23, atol=0)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {name: "two" if name.endswith("_scale_inv") else "one" for name in tensors}
    for part in ("one", "two"):
        save_file({name: tensors[name] for name in tensors if parts[name] == part}, tmp_path / f"{part}.safetensors")
    index = {"weight_map": {name: f"{part}.safetensors" for name, part in parts.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    same(WeightFiles(tmp_path), expected)
    with WeightFiles(tmp_path).slices() as read:
        torch.testing.assert_close(read(NAME)[4:9], expected[NAME][4:9], rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3"])
def test_decoder_and_policy_compute_with_what_they_stand_for(tmp_path: Path, name: str) -> None:
    expected = quantised(tmp_path / "fp8", name)
    save_model(tmp_path / "plain", name)
    save_file(expected, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    fp8, plain = (Decoder.from_pretrained(tmp_path / kind, torch.device("cpu"), torch.float32) for kind in ("fp8", "plain"))
    for decoder in (fp8, plain):
        decoder.reserve_positions(128)
    torch.testing.assert_close(whole_logits(fp8, TOKENS), whole_logits(plain, TOKENS), rtol=1e-5, atol=1e-5)
    (tmp_path / "copy").mkdir()
    hf_policy.write_description(tmp_path / "fp8", tmp_path / "copy", None)
    assert "quantization_config" not in json.loads((tmp_path / "copy" / "config.json").read_text())
    policies = [hf_policy.load_policy(str(tmp_path / kind)) for kind in ("fp8", "plain")]
    same(policies[0].state_dict().items(), {name: tensor.float() for name, tensor in policies[1].state_dict().items()})


def test_a_conversion_stores_the_declared_dtype(tmp_path: Path) -> None:
    expected = quantised(tmp_path / "fp8")
    edit(tmp_path / "fp8", dtype="bfloat16")
    conversion.to_core(tmp_path / "fp8", tmp_path / "core", Layout(tensor=2, expert=2), show=lambda *_: None)
    conversion.to_hf(tmp_path / "core", tmp_path / "back", show=lambda *_: None)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(found[NAME], expected[NAME].bfloat16())
    assert found["model.norm.weight"].dtype == torch.float32  # as it was stored
    conversion.to_core(tmp_path / "fp8", tmp_path / "half", Layout(tensor=2), dtype=torch.bfloat16, show=lambda *_: None)
    conversion.to_hf(tmp_path / "half", tmp_path / "again", show=lambda *_: None)
    kinds = {name: tensor.dtype for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {name for name in kinds if name.endswith("_bias")}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq', fmt 'e4m3', weight_block_size None"),
        ({**FP8, "fmt": "e5m2"}, r"fmt 'e5m2', weight_block_size \[16, 12\]"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ("awq", "quant_method None, fmt 'e4m3', weight_block_size None"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, config: Any, told: str) -> None:
    save_model(tmp_path)
    edit(tmp_path, quantization_config=config)
    fault = f"quantization_config: .*{told} is not supported; must be fp8, e4m3 and two"
    for read in (WeightFiles, lambda folder: hf_policy.load_policy(str(folder))):
        with pytest.raises(UserError, match=fault) as raised:
            read(tmp_path)
        assert len(str(raised.value).splitlines()) == 1


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    quantised(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for scales, told in ((None, "missing"), (torch.ones(2, 2), r"\[2, 2\]")):
        changed = {name: tensor for name, tensor in tensors.items() if name != f"{NAME}_scale_inv"}
        changed |= {} if scales is None else {f"{NAME}_scale_inv": scales}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=rf"{NAME} is of float8_e4m3fn, and {NAME}_scale_inv {told}; must be \[6, 2\]"):
            WeightFiles(tmp_path)


def test_whole_numbers_of_blocks_need_no_cut() -> None:
    weight = torch.randn(2 * BLOCKS[0], 3 * BLOCKS[1])
    stored, scales = quantise(weight)
    found = Dequantized(stored, scales, tuple(weight.shape), BLOCKS)[:]
    np.testing.assert_allclose(found.double().numpy(), stands_for(stored, scales), rtol=2**-23)
    assert blocks_of({}, "here") is None


class TestLayersThatPredictFurtherTokens:
    """Of multi-token prediction, behind the model's own."""

    def folder(self, folder: Path) -> list[str]:
        save_model(folder, "deepseek_v3")
        tensors = load_file(folder / "model.safetensors")
        own = [name for name in tensors if name.startswith("model.layers.3.")]
        more = {name.replace(".3.", ".4."): tensors[name].clone() for name in own} | {
            "model.layers.4.eh_proj.weight": torch.ones(2, 4)
        }
        save_file({**tensors, **more}, folder / "model.safetensors", metadata={"format": "pt"})
        edit(folder, num_nextn_predict_layers=1)
        return sorted(more)

    def test_are_left_out_which_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        more = self.folder(tmp_path / "model")
        with caplog.at_level(logging.INFO, "sluice"):
            files = WeightFiles(tmp_path / "model")
        assert sorted(files.left_out) == more
        assert f"{len(more)} tensors of layers for multi-token prediction are left out: model.layers.4." in caplog.text
        Decoder.from_pretrained(tmp_path / "model", torch.device("cpu"), torch.float32)
        policy = hf_policy.load_policy(str(tmp_path / "model"))
        assert len(policy.model.layers) == 4
        report = conversion.to_core(tmp_path / "model", tmp_path / "core", Layout(), show=lambda *_: None)
        assert report.left_out == [f"{len(more)} tensors of multi-token prediction (model.layers.4.*)"]

    def test_that_config_json_does_not_tell_of_are_named(self, tmp_path: Path) -> None:
        more = self.folder(tmp_path)
        edit(tmp_path, num_nextn_predict_layers=0)
        with pytest.raises(UserError, match=f"{len(more)} unknown"):
            Decoder.from_pretrained(tmp_path, torch.device("cpu"), torch.float32)
        with pytest.raises(UserError, match=f"{len(more)} weights do not belong to the model: {', '.join(more)}"):
            hf_policy.load_policy(str(tmp_path))
