"""A model that writes nonsense and calls of one tool, with problems to play: a folder with model/, train.jsonl and eval.jsonl.

`python -m tests.agents.tool_model FOLDER`, from the repository and its environment.

Every byte is a token, and so is each of the two texts below: two layers with random weights, and a head that makes some tokens
likely behind others. So the model answers with calls of the tool, with bytes that are seldom UTF-8, or with both; and how
likely each is depends on all tokens before it. A program may run what it calls: it knows one command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken

from runtime.data import arithmetic
from runtime.models.families import family_for
from runtime.models.tiny_model import END_OF_TEXT, END_OF_TURN, described, make_tokenizer
from tests.unit.template_cases import HERMES

TOOL = "bash"
ARGUMENTS = ' {"command": "echo $((40 + 2))"}}\n</tool_call>'  # behind a beginning that the gateway forces
CALL = f'<tool_call>\n{{"name": "{TOOL}", "arguments":{ARGUMENTS}'
CONTEXT = 16384
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
EMBEDDING = 6.0  # standard deviation: what a token is weighs more in its hidden state than what stands before it
REST = 0.5  # standard deviation of the logits that are left to chance, about


def write(folder: Path) -> None:
    model = folder / "model"
    model.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CALL, ARGUMENTS)])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"eos_token": END_OF_TURN, "pad_token": END_OF_TEXT, "chat_template": HERMES}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = tokenizer.get_vocab_size()
    config = {**(described("tiny:qwen2") or {}), **SIZES, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT}
    (model / "config.json").write_text(json.dumps(config))
    ids = {text: tokenizer.token_to_id(text) for text in (CALL, ARGUMENTS, END_OF_TURN, "<|assistant|>", ":")}
    save_file(_weights(config, ids), model / "model.safetensors", metadata={"format": "pt"})
    for name, problems in zip(("train", "eval"), arithmetic.split(10, 30, 32, 1), strict=True):
        arithmetic.write_jsonl(folder / f"{name}.jsonl", problems)


def _weights(config: dict[str, Any], ids: dict[str, int]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    width, found = config["hidden_size"], dict[str, np.ndarray]()
    for name, shape in family_for(config).tensors().items():
        if name.endswith("norm.weight"):
            found[name] = np.ones(shape, np.float32)
        elif name.endswith("bias"):
            found[name] = np.zeros(shape, np.float32)
        else:
            found[name] = (random.standard_normal(shape) / np.sqrt(width)).astype(np.float32)
    embedding, head = found["model.embed_tokens.weight"], found["lm_head.weight"]
    head *= REST
    directions = embedding / np.linalg.norm(embedding, axis=1, keepdims=True) / np.sqrt(width)
    embedding *= EMBEDDING * np.sqrt(width)
    call, arguments, end, begin, colon = (ids[text] for text in (CALL, ARGUMENTS, END_OF_TURN, "<|assistant|>", ":"))
    likely = [(begin, call, 13.5), (call, call, 5.0), (call, end, 7.0), (arguments, end, 6.0), (colon, arguments, 12.0)]
    likely += [(byte, after, 4.0) for byte in range(256) if byte != colon for after in (call, end)]
    for before, after, logit in likely:
        head[after] += logit * directions[before]
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
