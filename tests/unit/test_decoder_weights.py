"""The parameters of the decoder: taken over where they lie, or copied in place, they compute what transformers computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime.errors import InvalidMessage
from runtime.models.hf_config import read_config
from runtime.rollout.torch.decoder import Decoder
from runtime.rollout.torch.decoder_weights import DecoderWeights, mismatch
from runtime.weights.group import allocate, tensors_of
from runtime.weights.plan import Manifest, TensorSpec, plan_buckets
from tests.closeness import assert_close, forward_terms
from tests.unit.test_decoder import CPU, LAYERS, load, whole_logits
from tests.unit.tiny_models import FAMILIES, WITH_EXPERTS, save_model

pytestmark = pytest.mark.numeric

ALL = [*FAMILIES, *WITH_EXPERTS]

TOKENS = torch.arange(12).view(1, -1)


class Received:
    """The weights of a model's folder in buckets, in the order of `names`."""

    def __init__(self, folder: Path, names: Sequence[str], bucket_bytes: int = 1 << 30):
        found = load_file(folder / "model.safetensors")
        names = [name for name in names if name in found]
        manifest = Manifest(tuple(TensorSpec(name, "float32", tuple(found[name].shape)) for name in names), bucket_bytes)
        buckets = plan_buckets(manifest)
        self.buffers = allocate(buckets, pin=False)
        self.tensors = dict(zip(names, tensors_of(manifest, buckets, self.buffers).values(), strict=True))
        for name in names:
            self.tensors[name].copy_(found[name])

    def holds(self, tensor: torch.Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(each.data_ptr() <= begin and end <= each.data_ptr() + each.nbytes for each in self.buffers)

    def adopted(self, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
        decoder = Decoder(DecoderWeights.adopt(read_config(folder), self.tensors, CPU, dtype))
        decoder.reserve_positions(128)
        return decoder

    def copies(self, weights: DecoderWeights) -> set[str]:
        """The parameters that do not lie in the buckets."""
        every = {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
        for layer in weights.layers:
            every.update((f"{name}-{id(layer)}", each) for name, each in vars(layer).items() if each is not None)
        return {name.split("-")[0] for name, each in every.items() if not self.holds(each)}


def names_of(model: Any) -> list[str]:
    """In the order in which a trainer names them: that of the model's modules."""
    return list(model.state_dict())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("name", ALL)
def test_adopted_weights_compute_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """In the order of a trainer nothing is copied but norms of each head, and experts, each of which is whole there before the
    next one, but for joined ones; in another order the parts do not adjoin."""
    model = save_model(tmp_path, name)
    joined = name not in WITH_EXPERTS or name == "gpt_oss"
    always = {"qk_norm"} if joined else {"qk_norm", "gate_up", "down"}
    if name == "deepseek_v3":  # a norm and a projection lie between its two down-projections
        always = always | {"qkv"}
    for order, copied in ((names_of(model), always), (sorted(names_of(model)), always | {"qkv", "qkv_bias"})):
        received = Received(tmp_path, order)
        decoder = received.adopted(tmp_path)
        assert_close(whole_logits(decoder, TOKENS), logits(model), terms=forward_terms(TOKENS.shape[1], layers=LAYERS))
        assert torch.equal(whole_logits(decoder, TOKENS), whole_logits(load(tmp_path), TOKENS))
        has = {field for field, each in vars(decoder.weights.layers[0]).items() if each is not None}
        assert received.copies(decoder.weights) == copied & has


def test_what_a_boundary_of_buckets_separates_is_copied(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    received = Received(tmp_path, names_of(model), bucket_bytes=1)
    decoder = received.adopted(tmp_path)
    assert received.copies(decoder.weights) == {"qkv", "qkv_bias", "gate_up"}
    assert_close(whole_logits(decoder, TOKENS), logits(model), terms=forward_terms(TOKENS.shape[1], layers=LAYERS))


def test_tensors_that_lie_side_by_side_by_chance_are_not_taken_for_one(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    received = Received(tmp_path, names_of(model))
    key = "model.layers.0.self_attn.k_proj.weight"
    received.tensors[key] = received.tensors[key].clone()
    transposed = "model.layers.1.self_attn.q_proj.weight"
    received.tensors[transposed].copy_(received.tensors[transposed].t().clone())
    received.tensors[transposed] = received.tensors[transposed].t()
    decoder = received.adopted(tmp_path)
    assert received.copies(decoder.weights) == {"qkv"}
    assert_close(whole_logits(decoder, TOKENS), logits(model), terms=forward_terms(TOKENS.shape[1], layers=LAYERS))


def test_another_dtype_is_copied(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    received = Received(tmp_path, names_of(model))
    decoder = received.adopted(tmp_path, torch.bfloat16)
    assert "embedding" in received.copies(decoder.weights)
    for tensor in received.tensors.values():
        tensor.zero_()  # nothing of it is used any more
    assert torch.equal(whole_logits(decoder, TOKENS), whole_logits(load(tmp_path, torch.bfloat16), TOKENS))


@pytest.mark.parametrize("name", ALL)
def test_new_weights_are_loaded_in_place_part_by_part(tmp_path: Path, name: str) -> None:
    save_model(tmp_path / "old", name)
    model = save_model(tmp_path / "new", name, seed=1)
    decoder = load(tmp_path / "old")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    for each, tensor in tensors.items():
        decoder.weights.load([(each, tensor)])
    assert_close(whole_logits(decoder, TOKENS), logits(model), terms=forward_terms(TOKENS.shape[1], layers=LAYERS))


def test_a_tied_head_may_come_along(tmp_path: Path) -> None:
    save_model(tmp_path)
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    for given in (tensors, both):
        weights = DecoderWeights.adopt(config, given, CPU, torch.float32)
        assert weights.head is weights.embedding
        weights.load(given.items())
        assert mismatch(config, {name: tensor.shape for name, tensor in given.items()}) is None


def test_unfit_weights_are_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path)
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.self_attn.k_proj.bias"}
    misshapen = {"model.norm.weight": torch.zeros(31)}

    def adopt(given: dict[str, torch.Tensor]) -> DecoderWeights:
        return DecoderWeights.adopt(config, given, CPU, torch.float32)

    with pytest.raises(InvalidMessage, match=r"missing model\.layers\.1\.self_attn\.k_proj\.bias"):
        adopt(missing)
    with pytest.raises(InvalidMessage, match=r"unknown model\.extra"):
        adopt({**tensors, "model.extra": torch.zeros(1)})
    with pytest.raises(InvalidMessage, match=r"model\.norm\.weight has shape \[31\], must be \[32\]"):
        adopt({**tensors, **misshapen})
