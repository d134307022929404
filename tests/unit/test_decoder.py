"""The lean decoder computes what transformers computes, from weights that it reads, takes over where they lie or copies in
place; its rotary frequencies are transformers' and the papers'; folders and weights that do not fit are refused by name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.errors import InvalidMessage, UserError
from runtime.models import forward
from runtime.models.forward import Packing, read_rope
from runtime.models.hf_folder import read_config
from runtime.rollout.torch import decoder as decoder_module
from runtime.rollout.torch.decoder import Decoder, KVCache, Span, kv_bytes
from runtime.rollout.torch.decoder_weights import DecoderWeights, mismatch
from runtime.weights.group import arena, tensors_of
from runtime.weights.plan import TensorSpec, arena_offsets
from tests.closeness import assert_close, forward_terms
from tests.unit.tiny_models import FAMILIES, VOCABULARY, WITH_EXPERTS, save_model, saved

pytestmark = pytest.mark.numeric

ALL = [*FAMILIES, *WITH_EXPERTS]

CPU = torch.device("cpu")
LAYERS = 4  # at most
TOKENS = torch.arange(12).view(1, -1)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder.from_pretrained(folder, CPU, dtype)
    decoder.reserve_positions(128)
    return decoder


@torch.inference_mode()
def whole_logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    positions, cells = torch.arange(tokens.shape[1]).repeat(len(tokens)), torch.arange(tokens.numel())
    hidden = decoder.packed(tokens.flatten(), positions, Packing([cells.view(tokens.shape)], cells))
    return decoder.logits(hidden).view(*tokens.shape, -1)


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return model(tokens).logits


def assert_equals(model: Any, found: torch.Tensor, tokens: torch.Tensor = TOKENS) -> None:
    assert_close(found, logits(model, tokens), terms=forward_terms(tokens.shape[1], layers=LAYERS))


@pytest.mark.parametrize("name", ALL)
def test_logits_equal_transformers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of whole texts longer than a window, whose queries are attended at once or in blocks, and token by token from a cache,
    whose rows are attended apart and by either way; gpt-oss has sinks, which the fused one has no place for.
    """
    folder, model = saved(name)
    decoder, tokens = load(folder), torch.randint(0, VOCABULARY, (3, 90), generator=torch.Generator().manual_seed(0))
    assert_equals(model, whole_logits(decoder, tokens), tokens)
    tokens = tokens[:, :20]
    monkeypatch.setattr(forward, "_BLOCK", 4)
    assert_equals(model, whole_logits(decoder, tokens), tokens)
    for attend in ("attend_batched", "attend_fused")[: 1 if name == "gpt_oss" else 2]:
        decoder._attend_cached = getattr(decoder_module, attend)
        cache = KVCache(decoder.config, len(tokens) + 1, 64, CPU, decoder.dtype)
        found = []
        with torch.inference_mode():
            for position, column in enumerate(tokens.T):
                spans = [Span(0, 1, 64), Span(1, len(tokens), position + 1)]
                found.append(decoder.decode(column, torch.full((len(tokens),), position), cache, spans))
        assert_equals(model, torch.stack(found, 1), tokens)


def test_sharded_files_load_like_one(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_equals(model, whole_logits(load(tmp_path), TOKENS))


def in_float32(head: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.nn.functional.linear(hidden.bfloat16().float(), head)


def test_bfloat16_is_rounded_where_the_trainer_rounds() -> None:
    """Under autocast, with logits in float32 as on CPUs. Roundings at other places make a difference of 1 to 2 %. A whole text
    has a tenth of that, and a text token by token half, whose attention adds up in another order. A mixture's experts are not
    transformers', of either side."""
    tokens = torch.arange(40).view(1, -1)
    for name in FAMILIES:
        folder, model = saved(name)
        rounded = copy.deepcopy(model)
        for key, held in [*rounded.named_parameters(), *rounded.named_buffers()]:
            held.data = held.data.bfloat16().float() if "inv_freq" not in key else held.data
        rounded.lm_head.forward = partial(in_float32, rounded.lm_head.weight)
        with torch.autocast("cpu", torch.bfloat16):
            expected = logits(rounded, tokens).float()
        decoder = load(folder, torch.bfloat16)
        found, cache = [whole_logits(decoder, tokens)], KVCache(decoder.config, 1, 64, CPU, decoder.dtype)
        with torch.inference_mode():
            steps = (
                decoder.decode(tokens[:, at], torch.tensor([at]), cache, [Span(0, 1, at + 1)]) for at in range(tokens.shape[1])
            )
            found.append(torch.stack(list(steps), 1))
        for each, bound in zip(found, (2e-3, 1e-2), strict=True):
            assert each.dtype == torch.float32
            assert (each - expected).abs().mean() < bound * expected.abs().mean(), name


def edited(folder: Path, name: str, **changes: object) -> Path:
    """A folder of that model with another config.json."""
    source, _ = saved(name)
    (folder / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **changes}))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return folder


def test_a_folder_that_is_not_a_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no config\.json"):
        load(tmp_path)
    save_model(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    maps = ("{}", *(f'{{"weight_map": {{"a": {name}}}}}' for name in ('"../model.safetensors"', "1", '""')))
    for content in maps:
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(UserError, match="not an index of safetensors shards in the same folder"):
            load(tmp_path)
    for raw, told in ((b"\xff", "not valid JSON"), (b"[" * 100_000, "not valid JSON"), (b"[]", "is not a JSON object")):
        (tmp_path / "model.safetensors.index.json").write_bytes(raw)
        with pytest.raises(UserError, match=told):
            load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"model_type": "gpt2"}, "model_type 'gpt2' is not supported; must be one of llama, qwen2, qwen3"),
        ("qwen2", {"head_dim": 7}, "head_dim is 7; must be even"),
        ("qwen2", {"max_position_embeddings": "far"}, r"Expected `int`, got `str` - at `\$\.max_positions`"),
        ("qwen2", {"vocab_size": 64}, r"model\.embed_tokens\.weight has shape \[61, 32\], must be \[64, 32\]"),
        (
            "qwen2",
            {"num_hidden_layers": 3},
            r"12 tensors missing, 0 unknown: missing model\.layers\.2\.input_layernorm\.weight",
        ),
        ("qwen2", {"tie_word_embeddings": False}, r"1 tensors missing, 0 unknown: missing lm_head\.weight"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported; must be None"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported; must be 'gelu_pytorch_tanh'"),
        (
            "gemma3",
            {"layer_types": ["chunked_attention"] * 2},
            "layer_types is .*; must be full_attention or sliding_attention",
        ),
        ("gemma3", {"layer_types": ["full_attention"]}, "must be full_attention or sliding_attention for each layer"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config .*mxfp4.* is not supported"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported; must be 7.0"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; must be at most num_local_experts 4"),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2 of head_dim 16; must be above 0, at most 1"),
        ("glm4_moe", {"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1; must be a positive integer"),
    ],
)
def test_a_model_that_is_not_supported_is_a_user_error(
    tmp_path: Path, name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load(edited(tmp_path, name, **changes))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "thetas", "newer"),
    [
        (
            "llama3_scaled",
            (500.0, None),
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
            | {"original_max_position_embeddings": 32},
        ),
        (
            "gemma3",
            (500.0, 50.0),
            {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ],
)
def test_ropes_may_be_written_the_newer_way(
    tmp_path: Path, name: str, thetas: tuple[float, float | None], newer: dict[str, Any]
) -> None:
    old = read_config(saved(name)[0])
    assert old.rope.theta == thetas[0] and thetas[1] in (None, old.local_theta)
    other = {} if thetas[1] is None else {"rope_local_base_freq": 9.0}
    assert read_config(edited(tmp_path, name, rope_scaling=None, rope_theta=9.0, rope_parameters=newer, **other)) == old


def test_kv_bytes_is_what_the_cache_takes_and_more_than_memory_is_a_user_error() -> None:
    config = read_config(saved()[0])
    cache = KVCache(config, 3, 50, CPU, torch.bfloat16)
    assert kv_bytes(config, 3, 50, torch.bfloat16) == cache.data.nbytes
    needed = kv_bytes(config, 10**9, 10**5, torch.float32)
    with pytest.raises(UserError, match=rf"services\.rollout\.max_num_seqs: .* need {needed} bytes .* bytes available"):
        KVCache(config, 10**9, 10**5, CPU, torch.float32)


# ---------------------------------------------------------------------------------------------- parameters


class Received:
    """The weights of a model's folder in an arena, in the order of `names`."""

    def __init__(self, folder: Path, names: Sequence[str]):
        found = load_file(folder / "model.safetensors")
        self.folder = folder
        names = [name for name in names if name in found]
        specs = [TensorSpec(name, "float32", tuple(found[name].shape)) for name in names]
        (self.arena,) = arena([arena_offsets(specs)[1]])
        self.tensors = {names[index]: tensor for index, tensor in tensors_of(specs, self.arena).items()}
        for name in names:
            self.tensors[name].copy_(found[name])

    def holds(self, tensor: torch.Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return self.arena.data_ptr() <= begin and end <= self.arena.data_ptr() + self.arena.nbytes

    def adopted(self, dtype: torch.dtype = torch.float32) -> Decoder:
        decoder = Decoder(DecoderWeights.adopt(read_config(self.folder), self.tensors, CPU, dtype))
        decoder.reserve_positions(128)
        return decoder

    def copies(self, weights: DecoderWeights) -> set[str]:
        """The parameters that do not lie in the arena."""
        every = {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
        for layer in weights.layers:
            every.update((f"{name}-{id(layer)}", each) for name, each in vars(layer).items() if each is not None)
        return {name.split("-")[0] for name, each in every.items() if not self.holds(each)}


def names_of(model: Any) -> list[str]:
    """In the order in which a trainer names them: that of the model's modules."""
    return list(model.state_dict())


@pytest.mark.parametrize("name", ALL)
def test_adopted_weights_compute_what_transformers_computes(name: str) -> None:
    """In the order of a trainer nothing is copied but norms of each head, and experts, each of which is whole there before the
    next one, but for joined ones; in another order the parts do not adjoin."""
    folder, model = saved(name)
    joined = name not in WITH_EXPERTS or name == "gpt_oss"
    always = {"qk_norm"} if joined else {"qk_norm", "gate_up", "down"}
    if name == "deepseek_v3":  # a norm and a projection lie between its two down-projections
        always = always | {"qkv"}
    for order, copied in ((names_of(model), always), (sorted(names_of(model)), always | {"qkv", "qkv_bias"})):
        received = Received(folder, order)
        decoder = received.adopted()
        assert_equals(model, whole_logits(decoder, TOKENS))
        assert torch.equal(whole_logits(decoder, TOKENS), whole_logits(load(folder), TOKENS))
        has = {field for field, each in vars(decoder.weights.layers[0]).items() if each is not None}
        assert received.copies(decoder.weights) == copied & has


def test_tensors_that_lie_side_by_side_by_chance_are_not_taken_for_one() -> None:
    folder, model = saved()
    received = Received(folder, names_of(model))
    key = "model.layers.0.self_attn.k_proj.weight"
    received.tensors[key] = received.tensors[key].clone()
    transposed = "model.layers.1.self_attn.q_proj.weight"
    received.tensors[transposed].copy_(received.tensors[transposed].t().clone())
    received.tensors[transposed] = received.tensors[transposed].t()
    decoder = received.adopted()
    assert received.copies(decoder.weights) == {"qkv"}
    assert_equals(model, whole_logits(decoder, TOKENS))


def test_another_dtype_is_copied() -> None:
    folder, model = saved()
    received = Received(folder, names_of(model))
    decoder = received.adopted(torch.bfloat16)
    assert "embedding" in received.copies(decoder.weights)
    for tensor in received.tensors.values():
        tensor.zero_()  # nothing of it is used any more
    assert torch.equal(whole_logits(decoder, TOKENS), whole_logits(load(folder, torch.bfloat16), TOKENS))


@pytest.mark.parametrize("name", ALL)
def test_new_weights_are_loaded_in_place_part_by_part(name: str) -> None:
    folder, model = saved(name)
    decoder = load(folder)
    for tensor in decoder.weights.tensors():
        tensor.fill_(0.1)
    for each, tensor in load_file(folder / "model.safetensors").items():
        decoder.weights.load([(each, tensor)])
    assert_equals(model, whole_logits(decoder, TOKENS))


def test_a_tied_head_may_come_along() -> None:
    folder, _ = saved()
    config, tensors = read_config(folder), load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    for given in (tensors, both):
        weights = DecoderWeights.adopt(config, given, CPU, torch.float32)
        assert weights.head is weights.embedding
        weights.load(given.items())
        assert mismatch(config, {name: tensor.shape for name, tensor in given.items()}) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model.layers.1.self_attn.k_proj.bias": None}, r"missing model\.layers\.1\.self_attn\.k_proj\.bias"),
        ({"model.extra": torch.zeros(1)}, r"unknown model\.extra"),
        ({"model.norm.weight": torch.zeros(31)}, r"model\.norm\.weight has shape \[31\], must be \[32\]"),
    ],
)
def test_unfit_weights_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    folder, _ = saved()
    given = {name: each for name, each in (load_file(folder / "model.safetensors") | changes).items() if each is not None}
    with pytest.raises(InvalidMessage, match=told):
        DecoderWeights.adopt(read_config(folder), given, CPU, torch.float32)


# ---------------------------------------------------------------------------------------------- rotary frequencies

DIM, THETA, POSITIONS = 16, 500.0, 128

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear, as it was written first": {"type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn of a model that was not stretched in config.json": {"rope_type": "yarn", "factor": 4.0},
    "yarn with nulls": {**YARN, "beta_fast": None, "attention_factor": None},
    "yarn, bounds not rounded": {**YARN, "truncate": False},
    "yarn, other bounds": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn, bounds alike": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, its growth given": {**YARN, "attention_factor": 1.25},
    "yarn, as DeepSeek has it": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}


def described(scaling: dict[str, Any] | None) -> dict[str, Any]:
    return {"rope_theta": THETA, "rope_scaling": scaling, "max_position_embeddings": POSITIONS}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_amplitude_are_those_of_transformers(kind: str) -> None:
    scaling = KINDS[kind]
    # As its own modules call it: some of its functions want a config without the older spelling.
    config = LlamaConfig(**described(scaling), head_dim=DIM)
    name = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    expected, amplitude = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"))
    rope = read_rope(described(scaling), "config.json")
    assert_close(rope.frequencies(DIM), expected, terms=4)
    if name != "llama3":  # which transformers computes in another order
        assert torch.equal(rope.frequencies(DIM), expected)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ({"rope_type": "dynamic"}, "rope_type 'dynamic' is not supported; must be one of default, linear, llama3"),
        ({"rope_type": "linear"}, "rope_scaling: Object missing required field `factor`"),
        ({"rope_type": "linear", "factor": 0.5}, r"rope_scaling: Expected `float` >= 1\.0 - at `\$\.factor`"),
        ({"rope_type": "yarn", "factor": "much"}, r"rope_scaling: Expected `float`, got `str` - at `\$\.factor`"),
        (LLAMA3, "rope_scaling: Object missing required field `original_max_position_embeddings`"),
        ("linear", "rope_scaling is 'linear'; must be an object or null"),
        ({"rope_type": "default", "rope_theta": 1}, r"rope_theta: Expected `float` > 1\.0"),
        ({"rope_type": "default", "rope_theta": "big"}, "rope_theta: Expected `float`, got `str`"),
    ],
)
def test_what_is_unknown_or_missing_is_one_line(scaling: Any, told: str) -> None:
    with pytest.raises(UserError, match=f"^config.json: {told}") as raised:
        read_rope(described(scaling), "config.json")
    assert len(str(raised.value).splitlines()) == 1
