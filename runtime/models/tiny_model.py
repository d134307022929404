"""Make a byte-level tokenizer with a chat template, and a small Qwen2 with random weights, as one Hugging Face folder.

torch and transformers are imported where they are used, so that the tokenizer can be made without them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.config import Config, Warmup
from runtime.config.model import TINY_PREFIX as PREFIX
from runtime.errors import UserError
from runtime.models.families import FAMILIES, Family, family_for

if TYPE_CHECKING:
    import numpy as np
    from transformers import Qwen2ForCausalLM


END_OF_TEXT = "<|endoftext|>"  # padding
END_OF_TURN = "<|im_end|>"  # ends every message, and so a reply
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL_TOKENS = ("<tool_call>", "</tool_call>")  # around a call, as in Hermes and Qwen; they are text, not special tokens
CONTEXT_TOKENS = 512

CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{% set tool = tool.function or tool %}{{ '' if loop.first else '\\n' }}"
    '{"name": {{ tool.name | tojson }}'
    '{% if tool.description %}, "description": {{ tool.description | tojson }}{% endif %}'
    ', "parameters": {{ (tool.parameters or {}) | tojson }}}{% endfor %}<|im_end|>{% endif %}'
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function or call %}"
    "{{ '\\n' if message.content or not loop.first else '' }}<tool_call>{{ '\\n' }}"
    '{"name": {{ call.name | tojson }}, '
    '"arguments": {{ call.arguments if call.arguments is string else call.arguments | tojson }}}'
    "{{ '\\n' }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Three times Hugging Face's default. At a width of 128, weights of 0.02 leave attention nearly uniform. Supervised training
# then needs twice the steps to distinguish digits.
INITIALIZER_RANGE = 0.06


class Shape(Struct, frozen=True):
    """The sizes of a Qwen2."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 384


WARMED_UP = {"sums": Shape(), "lookup": Shape(hidden_size=64, layers=2, kv_heads=4, intermediate_size=128)}
"""The model of a warm-up, by `warmup.task`."""


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` at the end, so that it appears whole or not at all. If another process was
    first, its folder stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        yield whole
        try:
            whole.rename(folder)
        except OSError:  # rename never replaces a folder that is not empty
            if not folder.exists():
                raise


def byte_symbols() -> list[str]:
    """Return the character of each byte value in a byte-level vocabulary (GPT-2's reversible mapping). Printable characters of
    Latin-1 stand for themselves; the others take code points from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def make_tokenizer() -> Tokenizer:
    """Make the tokenizer. Token ids 0 to 255 are the bytes of UTF-8; then come SPECIAL_TOKENS and CALL_TOKENS, in order."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path, context_tokens: int = CONTEXT_TOKENS) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` loads, into `folder`."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": context_tokens,
        "model_input_names": ["input_ids", "attention_mask"],  # what `generate` takes
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def make_model(shape: Shape, tokenizer: Tokenizer, vocabulary: int = 0, seed: int = 7) -> Qwen2ForCausalLM:
    """Return a Qwen2 with random float32 weights and tied embeddings; `save_pretrained` writes its files.
    `vocabulary`: the model's, if larger than the tokenizer's, as in published models."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    end = tokenizer.token_to_id(END_OF_TURN)
    config = Qwen2Config(
        vocab_size=max(vocabulary, tokenizer.get_vocab_size()),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


# ----------------------------------------------------------------------------------------------------------------------
# `tiny:FAMILY` in place of a model's folder: a small random model of that family, to rehearse a configuration.
#
# The folder is a Hugging Face folder like any other. It is made if missing, with the same bytes on every machine. Its sizes are
# multiples of the parallel sizes in configs/models. Neither torch nor transformers is loaded.


NAMES = ", ".join(f"{PREFIX}{name}" for name in sorted(FAMILIES))

MOST_TOKENS = 131_072  # more than any of our configurations needs
DEVIATION = 0.06  # of the weights
SEED = 7
RECIPE = 4  # part of the cache's key: raise it when this file changes the content of a folder

_SIZES = {
    "vocab_size": 256 + len(SPECIAL_TOKENS) + len(CALL_TOKENS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,  # the smallest that vLLM supports on CPUs
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 256},  # vLLM divides it by the heads and ignores head_dim
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mistral": {"sliding_window": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma3_text": {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
    "glm4_moe": {
        "attention_bias": True,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",  # without this key vLLM does not correct scores
    },
}


def fault(path: str) -> str:
    """Return what is wrong with a path that begins with PREFIX; "" if nothing is, or the path is a folder."""
    if not path.startswith(PREFIX) or path.removeprefix(PREFIX) in FAMILIES:
        return ""
    return f"'{path}' is not one of {NAMES}"


def described(path: str, *, scores: bool = False) -> dict[str, Any] | None:
    """Return the config.json that `tiny:FAMILY` stands for; None for a folder or an unknown family. `scores`: for a reward
    model, a sequence classifier with one label."""
    name = path.removeprefix(PREFIX)
    if not path.startswith(PREFIX) or name not in FAMILIES:
        return None
    special = {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
    task = "ForSequenceClassification" if scores else "ForCausalLM"
    return {
        "model_type": name,
        "architectures": [FAMILIES[name].architecture + task],
        **_SIZES,
        **({"id2label": {"0": "score"}, "label2id": {"score": 0}} if scores else {}),
        "hidden_act": "silu",
        "max_position_embeddings": MOST_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": special[END_OF_TURN],
        "pad_token_id": special[END_OF_TEXT],
        **_OWN.get(name, {}),
    }


def made(config: Config) -> Config:
    """Return the configuration with a folder in place of every `tiny:FAMILY`; write the folders that are missing. Raises
    UserError if a folder cannot be written."""
    cache = Path((config.warmup or Warmup()).cache)

    def folder(path: str, *, scores: bool = False) -> str:
        found = described(path, scores=scores)
        return path if found is None else str(_written(cache, found, scores))

    model, critic, reward = config.model, config.critic, config.rewards.model
    train = config.data.train
    if not isinstance(train, str):
        train = [replace(source, reference=folder(source.reference)) for source in train]
    return replace(
        config,
        model=replace(model, path=folder(model.path), reference=folder(model.reference)),
        data=replace(config.data, train=train),
        critic=None if critic is None else replace(critic, path=folder(critic.path)),
        rewards=replace(
            config.rewards, model=None if reward is None else replace(reward, path=folder(reward.path, scores=True))
        ),
    )


def _written(cache: Path, described: dict[str, Any], scores: bool) -> Path:
    """Return the folder of that config.json. If it is missing, write it."""
    digest = hashlib.sha256(json.dumps([RECIPE, SEED, DEVIATION, described], sort_keys=True).encode()).hexdigest()
    folder = cache / f"tiny-{described['model_type']}-{digest[:16]}"
    if folder.exists():
        return folder
    try:
        with appearing(folder) as whole:
            _write(whole, described, family_for(described, value_head=scores, mapped=False))
    except OSError as error:
        raise UserError(f"model.path: a tiny model cannot be written to {folder}: {error.strerror or error}") from error
    return folder


def _write(folder: Path, described: dict[str, Any], family: Family) -> None:
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder, MOST_TOKENS)
    save_file(dict(_weights(family)), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights, float32: norms that multiply by 1, biases of 0, normally distributed matrices."""
    import numpy as np

    random = np.random.default_rng(SEED)
    for name, shape in family.tensors().items():
        if name.endswith("norm.weight"):
            yield name, np.full(shape, 0 if family.centred_norms else 1, np.float32)
        elif name.endswith("bias"):
            yield name, np.zeros(shape, np.float32)
        else:
            yield name, random.standard_normal(shape, np.float32) * np.float32(DEVIATION)
