"""A byte-level tokenizer with a chat template, and a small Qwen2 with random weights, as one Hugging Face folder.

torch and transformers are imported where they are used, so that the tokenizer can be made without them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.config import Warmup

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

END_OF_TEXT = "<|endoftext|>"  # pads
END_OF_TURN = "<|im_end|>"  # ends every message, and thereby a reply
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>")
CONTEXT_TOKENS = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Three times Hugging Face's default: at a width of 128 the weights of 0.02 leave attention nearly uniform,
# and supervised training then needs twice the steps before it picks the digits apart.
INITIALIZER_RANGE = 0.06


def byte_symbols() -> list[str]:
    """The character that stands for each byte value in a byte-level vocabulary (GPT-2's reversible mapping).

    Printable characters of Latin-1 stand for themselves; the others take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def make_tokenizer() -> Tokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8; the special tokens follow in the order of SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
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


def make_model(settings: Warmup, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """A Qwen2 with random float32 weights and tied embeddings; `save_pretrained` writes its files. Seeded by `seed`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    end = tokenizer.token_to_id(END_OF_TURN)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    torch.manual_seed(settings.seed)
    return Qwen2ForCausalLM(config)
