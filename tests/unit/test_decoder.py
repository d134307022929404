"""The lean decoder computes what transformers computes, and refuses folders and weights that do not fit, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.errors import UserError
from runtime.models.hf_config import read_config
from runtime.rollout.torch import attention
from runtime.rollout.torch import decoder as decoder_module
from runtime.rollout.torch.decoder import Decoder, KVCache, Span, kv_bytes
from tests.closeness import assert_close, forward_terms
from tests.unit.tiny_models import FAMILIES, VOCABULARY, WITH_EXPERTS, save_model

pytestmark = pytest.mark.numeric

ALL = [*FAMILIES, *WITH_EXPERTS]

CPU = torch.device("cpu")
LAYERS = 4  # at most


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder.from_pretrained(folder, CPU, dtype)
    decoder.reserve_positions(128)
    return decoder


@torch.inference_mode()
def whole_logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    hidden = decoder.forward(tokens, positions)
    return decoder.logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)


@torch.inference_mode()
def greedy(decoder: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Continue prompts of different lengths side by side, token by token from the first."""
    cache = KVCache(decoder.config, len(prompts) + 1, 64, CPU, decoder.dtype)
    texts = [list(prompt) for prompt in prompts]
    positions = torch.zeros(len(prompts), dtype=torch.int64)
    while any(len(text) < len(prompt) + count for text, prompt in zip(texts, prompts, strict=True)):
        tokens = torch.tensor([text[position] for text, position in zip(texts, positions.tolist(), strict=True)])
        logits = decoder.decode(tokens, positions, cache, [Span(0, 1, 64), Span(1, len(prompts), int(positions.max()) + 1)])
        positions += 1
        for text, position, best in zip(texts, positions.tolist(), logits.argmax(-1).tolist(), strict=True):
            if position == len(text):
                text.append(best)
    return [text[len(prompt) :][:count] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    model = save_model(tmp_path, name)
    tokens = torch.randint(0, VOCABULARY, (3, 90))
    with torch.no_grad():
        expected = model(tokens).logits
    assert_close(whole_logits(load(tmp_path), tokens), expected, terms=forward_terms(tokens.shape[1], layers=LAYERS))


@pytest.mark.parametrize(
    ("name", "attend"),
    [
        (name, attend)
        for name in ALL
        for attend in ("attend_batched", "attend_fused")
        if (name, attend) != ("gpt_oss", "attend_fused")
    ],
)
def test_greedy_decoding_equals_generate(tmp_path: Path, name: str, attend: str) -> None:
    model = save_model(tmp_path, name)
    decoder = load(tmp_path)
    decoder._attend_cached = getattr(decoder_module, attend)
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
    texts = [model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0].tolist() for prompt in prompts]
    expected = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert greedy(decoder, prompts, 20) == expected


@pytest.mark.parametrize("name", ["mistral", "mixtral_sliding", "gemma3", "gemma3_capped", "gpt_oss"])
def test_logits_past_a_window_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of whole texts, whose queries are attended in blocks, and token by token from a cache."""
    monkeypatch.setattr(attention, "_BLOCK", 4)
    model, decoder = save_model(tmp_path, name), load(tmp_path)
    tokens = torch.randint(0, VOCABULARY, (2, 30))
    with torch.no_grad():
        expected = model(tokens).logits
    terms = forward_terms(tokens.shape[1], layers=LAYERS)
    assert_close(whole_logits(decoder, tokens), expected, terms=terms)
    cache = KVCache(decoder.config, 2, 32, CPU, decoder.dtype)
    with torch.inference_mode():
        for position, column in enumerate(tokens.T):
            found = decoder.decode(column, torch.full((2,), position), cache, [Span(0, 2, position + 1)])
            assert_close(found, expected[:, position], terms=terms)


def test_sharded_files_load_like_one(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    tokens = torch.arange(12).view(1, -1)
    with torch.no_grad():
        expected = model(tokens).logits
    assert_close(whole_logits(load(tmp_path), tokens), expected, terms=forward_terms(tokens.shape[1], layers=LAYERS))


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3")
    tokens = torch.arange(40).view(1, -1)
    logits = whole_logits(load(tmp_path, torch.bfloat16), tokens)
    assert logits.dtype == torch.float32
    with torch.no_grad():
        expected = model.to(torch.bfloat16)(tokens).logits.float()
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()  # a few round-offs of 2^-8: 0.4 % each


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


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
        with pytest.raises(UserError, match="not an index of safetensors shards, which are files beside it"):
            load(tmp_path)
    for raw, told in ((b"\xff", "not valid JSON"), (b"[" * 100_000, "not valid JSON"), (b"[]", "is not a JSON object")):
        (tmp_path / "model.safetensors.index.json").write_bytes(raw)
        with pytest.raises(UserError, match=told):
            load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; must be one of llama, qwen2, qwen3"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported; must be False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; must be 'silu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling: Object missing required field `low_freq_factor`",
        ),
        ({"vocab_size": "many"}, "vocab_size is 'many'; must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7; must be even"),
        ({"max_position_embeddings": "far"}, r"Expected `int`, got `str` - at `\$\.max_positions`"),
        ({"vocab_size": 64}, r"model\.embed_tokens\.weight has shape \[61, 32\], must be \[64, 32\]"),
        ({"num_hidden_layers": 3}, r"12 tensors missing, 0 unknown: missing model\.layers\.2\.input_layernorm\.weight"),
        ({"tie_word_embeddings": False}, r"1 tensors missing, 0 unknown: missing lm_head\.weight"),
    ],
)
def test_a_model_that_is_not_supported_is_a_user_error(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    save_model(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
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
def test_what_a_family_of_its_own_cannot_have_is_a_user_error(
    tmp_path: Path, name: str, changes: dict[str, object], message: str
) -> None:
    save_model(tmp_path, name)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as raised:
        load(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


def test_rope_may_be_written_the_newer_way(tmp_path: Path) -> None:
    save_model(tmp_path, "llama3_scaled")
    old = read_config(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, rope_scaling=None, rope_theta=1.0, rope_parameters={**raw["rope_scaling"], "rope_theta": 500.0})
    assert read_config(tmp_path) == old
    assert old.rope.theta == 500.0


def test_two_ropes_may_be_written_the_newer_way(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3")
    old = read_config(tmp_path)
    assert (old.rope.theta, old.local_theta) == (500.0, 50.0)
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    edit_config(tmp_path, rope_scaling=None, rope_theta=9.0, rope_local_base_freq=9.0, rope_parameters=ropes)
    assert read_config(tmp_path) == old


def test_kv_bytes_is_what_the_cache_takes(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = read_config(tmp_path)
    cache = KVCache(config, 3, 50, CPU, torch.bfloat16)
    assert kv_bytes(config, 3, 50, torch.bfloat16) == cache.data.nbytes


def test_a_cache_larger_than_memory_is_a_user_error(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = read_config(tmp_path)
    needed = kv_bytes(config, 10**9, 10**5, torch.float32)
    with pytest.raises(UserError, match=rf"services\.rollout\.slots: .* need {needed} bytes .* bytes available"):
        KVCache(config, 10**9, 10**5, CPU, torch.float32)
