"""What is read of strangers' files: for each kind of file a few good ones, and what reads such a file as the product does."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as distributed

from launcher.conversion.torch_archive import ArchiveTensor, read_archive
from runtime import types
from runtime.config.yaml_text import read_mapping
from runtime.data.templates import ChatTemplate
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.models.hf_folder import WeightFiles, read_raw
from runtime.trainer.fsdp import state
from runtime.trainer.megatron.core_checkpoint import CoreCheckpoint
from runtime.weights.plan import TensorSpec

MARK = b"\n=== "  # before a file's name and a newline, where an input is a folder


@dataclass
class Target:
    """`seeds` makes the good inputs, in a folder that it may use; `read` reads one in such a folder. `words` are those that
    an input gets now and then."""

    seeds: Callable[[Path], list[bytes]]
    read: Callable[[bytes, Path], None]
    words: tuple[bytes, ...]


def packed(files: Mapping[str, bytes]) -> bytes:
    return b"".join(MARK + name.encode() + b"\n" + content for name, content in files.items())


def unpacked(data: bytes, folder: Path, names: tuple[str, ...]) -> None:
    """Files of other names are left out."""
    for part in data.split(MARK):
        name, _, content = part.partition(b"\n")
        if (text := name.decode("latin-1")) in names:
            (folder / text).parent.mkdir(exist_ok=True)
            (folder / text).write_bytes(content)


# Archives: a whole file, or the pickle alone, since what is changed within a zip is nearly always found by its checksums.


def archives(folder: Path) -> list[bytes]:
    value = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16).t()}, "args": ("x", 1, None)}
    made = []
    for protocol in (2, 4):
        torch.save(value, folder / "a.pt", pickle_protocol=protocol)
        with zipfile.ZipFile(folder / "a.pt") as archive:
            made += [archive.read("a/data.pkl"), (folder / "a.pt").read_bytes()]
    return [*made, pickle.dumps({"a": {1}, "b": Path("x"), "c": 1 << 70, "d": [b"x"] * 3})]


def read_any_archive(data: bytes, folder: Path) -> None:
    path = folder / "read.pt"
    if not data.startswith(b"PK"):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in (("data.pkl", data), ("data/0", bytes(64)), ("data/1", bytes(64))):
                archive.writestr(f"a/{name}", content)
    else:
        path.write_bytes(data)
    read_tensors(read_archive(path), 1000)


def read_tensors(value: Any, left: int) -> int:
    """Few of those in `value`, which may hold itself. How many values more may be looked at."""
    if isinstance(value, ArchiveTensor):
        assert value[:].numel() <= 1 << 20
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            if left <= 0:
                break
            left = read_tensors(each, left - 1)
    return left


# Tokenizers, and templates.

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
MESSAGES = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
)


def tokenizers(_: Path) -> list[bytes]:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": ["a b"], "unk_token": None}
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    token = {
        "id": 3,
        "content": "</s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pattern = {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|a+"}, "behavior": "Isolated", "invert": False}
    pre = {"type": "Sequence", "pretokenizers": [pattern, level]}
    common = {"version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFC"}, "post_processor": None}
    files = {
        "tokenizer_config.json": {
            "chat_template": "{{ messages[0].content }}",
            "eos_token": "</s>",
            "bos_token": {"content": "a"},
        },
        "special_tokens_map.json": {"pad_token": "</s>"},
        "generation_config.json": {"eos_token_id": [3]},
        "config.json": {"eos_token_id": 3},
    }
    made = [
        {
            "tokenizer.json": {**common, "added_tokens": [token], "pre_tokenizer": pre, "decoder": level, "model": model},
            **files,
        },
        {"tokenizer.json": {**common, "added_tokens": [], "pre_tokenizer": None, "decoder": None, "model": words}, **files},
    ]
    return [packed({name: json.dumps(content).encode() for name, content in each.items()}) for each in made]


def read_tokenizer(data: bytes, folder: Path) -> None:
    unpacked(data, folder, TOKENIZER)
    found = Tokenizer(str(folder))
    text = found.template.render(MESSAGES)  # type: ignore[union-attr]
    found.texts.decode_batch([ids.tolist() for ids in found.encode_texts([text, "ab ba</s> 12345"])])
    assert len(found.vocabulary) <= 1 << 20 and found.stop_ids and found.identity


TEMPLATES = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% set ns = namespace(n=0) %}{% macro m(x) %}{{ x | upper }}{% endmacro %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role not in ['user'] %}{% continue %}{% endif %}{{ m | tojson(indent=2) }}{{ ns.n * 3 }}{% endfor %}",
    "{% generation %}{{ messages[-1]['content'].split('=')[0].strip() }}{% endgeneration %}{{ strftime_now('%Y') }}"
    "{{ '%s-%5d' % ('x', 3) }}{{ '{:>8}'.format(1) }}{{ messages | map(attribute='role') | join(',') }}{{ range(3) | list }}",
)


def read_template(data: bytes, folder: Path) -> None:
    template = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>"}, "model.chat_template: x.jinja")
    assert len(template.render(MESSAGES)) <= 1 << 22


# Checkpoints, of either engine; and the weights of a model.

CHECKPOINT = ("position.msgpack", "trainer.json", "model.safetensors", "model.safetensors.index.json", "config.json")
CORE = ("megatron/.metadata", "megatron/__0_0.distcp", "trainer.json")


def checkpoints(folder: Path) -> list[bytes]:
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "decoder.layers.mlp.weight": torch.ones(2, 2),
        "optimizer.master.a": torch.ones(2),
    }
    save_file(tensors, folder / "model.safetensors")
    distributed.save(tensors, storage_writer=distributed.FileSystemWriter(folder / "core"), no_dist=True)
    version = {"step": 3, "incarnation": 1}
    position = {"version": version, "stream": {"epoch": 0, "offset": 4}, "trained": [(0, 3)], "files": {"trainer.json": 10}}
    index = {"weight_map": {"a": "model.safetensors"}}
    trainer = {"format": 1, "step": 3, "optimizer_updates": 3, "kl_coefficient": 0.1}
    weights = (folder / "model.safetensors").read_bytes()
    return [
        packed({"position.msgpack": types.encode(position), "trainer.json": json.dumps(trainer).encode()}),
        packed({"model.safetensors": weights, "config.json": b'{"model_type": "qwen2"}', "trainer.json": b'{"format": 2}'}),
        packed({"model.safetensors.index.json": json.dumps(index).encode(), "position.msgpack": types.encode(position)}),
        packed(
            {
                "megatron/.metadata": (folder / "core" / ".metadata").read_bytes(),
                "megatron/__0_0.distcp": (folder / "core" / "__0_0.distcp").read_bytes(),
                "trainer.json": b'{"engine": "megatron"}',
            }
        ),
    ]


def read_checkpoint(data: bytes, folder: Path) -> None:
    """Each of its files, whatever the others are."""
    unpacked(data, folder, (*CHECKPOINT, *CORE))
    checkpoint.fault(folder)
    readers: list[Callable[[Path], object]] = [
        checkpoint.read_position,
        partial(state.read_description, adapters=None),
        read_raw,
        read_weights,
        read_core,
    ]
    for read in readers:
        try:
            read(folder)
        except UserError as error:
            assert_line(error)


def read_weights(folder: Path) -> None:
    for _, tensor in WeightFiles(folder):
        assert tensor.numel() <= 1 << 20


def read_core(folder: Path) -> None:
    core = CoreCheckpoint(folder)
    for name, tensor in core._stored.items():
        if tensor.size.numel() <= 1 << 20:
            core.specs[name] = checkpoint_spec(name, tensor)
            core.get(name)


def checkpoint_spec(name: str, tensor: Any) -> Any:
    return TensorSpec(name, str(tensor.properties.dtype).removeprefix("torch."), tuple(tensor.size))


# YAML.


def yamls(_: Path) -> list[bytes]:
    return [
        b"run: {name: a, seed: 1e3}\ntraining: &t\n  s: 10\n  betas: [0.9, 0x1f]\nother: {<<: *t, x: !!int 3}\nl: [*t, ~]\n",
        b'a: &a ["x", &b {k: |\n  text\n  }]\nc: ? [1]\n  : 2\n--- \n',
    ]


def read_yaml(data: bytes, folder: Path) -> None:
    (folder / "a.yaml").write_bytes(data)
    read_mapping(folder / "a.yaml")


def assert_line(error: Exception) -> None:
    text = str(error)
    assert "\n" not in text.strip(), f"more than one line: {text!r}"


PICKLED = (
    b"cos\nsystem\n(S'true'\ntR.",
    b"\x93R",
    b"\x85R",
    b"}",
    b"]",
    b"s",
    b"u",
    b"b",
    b"h\x00",
    b"\x94",
    b"\x8a\xff",
    b"Q",
    b"2",
)
JSON = (b"null", b"-1", b"1e999", b'"\\ud800"', b"{}", b"[]", b"18446744073709551616", b"NaN", b"true", b'{"a":')
TARGETS = {
    "archive": Target(archives, read_any_archive, PICKLED),
    "tokenizer": Target(
        tokenizers, read_tokenizer, (*JSON, b'"(a+)+$"', b'"Unigram"', b'"WordPiece"', b'"byte_fallback": true,')
    ),
    "template": Target(
        lambda _: [text.encode() for text in TEMPLATES],
        read_template,
        (
            *(b"{{ ''.__class__.__mro__ }}", b"| attr('x')", b"* 99999999", b"** 9999", b"{% for a in range(999) %}", b"% 0"),
            *(b"{% endfor %}", b"{% include 'x' %}", b"{% import '/etc/passwd' as x %}", b"| center(99999999)", b"lipsum(99)"),
            *(b"self", b"cycler", b"messages.append(1)", b"'%099999999d' % 1", b"'{:>999999999}'.format(1)", b"{% raw %}"),
        ),
    ),
    "checkpoint": Target(checkpoints, read_checkpoint, (*PICKLED, *JSON, b"\xff" * 8, b"../", b"\xdd\xff\xff\xff\xff")),
    "yaml": Target(
        yamls,
        read_yaml,
        (
            b"&a ",
            b"*a",
            b"<<: ",
            b"!!set ",
            b"!!binary ",
            b"!!omap ",
            b"[" * 50,
            b"? ",
            b"!!python/name:os.system ",
            b"%YAML 9.9\n",
            b"\xef\xbb\xbf",
        ),
    ),
}
