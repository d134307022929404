"""`sluice convert` of Megatron-LM's own checkpoints: what megatron-core's GPTModel saves so, transformers computes as well, and
what is converted into that layout, GPTModel loads strictly and computes. The peak of memory stays below 1.5 times the largest
shard and a little, whatever the model's size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.models import hf_policy
from runtime.models.forward import Packing
from tests.system.classic_member import TOKENS, Case, run
from tests.system.runs import ROOT
from tests.unit.family_cases import CONFIGS, write_folder
from tests.unit.test_convert import load_folder, same, sluice

VOCABULARY = 101
LONG = pytest.mark.long
SAVED = [
    Case(tensor=2, pipeline=2),
    Case(pipeline=2, chunks=2, family="qwen3"),
    pytest.param(Case(pipeline=2, tied=True, family="llama"), marks=LONG),
    pytest.param(Case(expert=2, family="qwen3_moe"), marks=LONG),
    Case(family="qwen3_moe", grouped=True),
    Case(tensor=2, expert=2, expert_tensor=1, family="qwen3_moe"),
]
LOADED = [
    pytest.param(Case(tensor=2, pipeline=2), "", marks=LONG),
    (Case(pipeline=2, chunks=2, family="qwen3"), "--layers-per-virtual-stage 1"),
    pytest.param(Case(expert=2, tensor=1, family="qwen3_moe"), "", marks=LONG),
    (Case(family="qwen3_moe", grouped=True), "--moe-grouped-gemm"),
    (Case(tensor=2, expert=2, expert_tensor=1, family="qwen3_moe"), "--expert-tensor-parallel 1"),
]


@pytest.fixture(autouse=True)
def _needs_megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")


def name_of(value: Any) -> str:
    return "-".join(str(item) for item in value if item) if isinstance(value, Case) else ""


def write_config(folder: Path, case: Case) -> Path:
    """A Hugging Face folder without weights."""
    folder.mkdir()
    config = CONFIGS[case.family] | {"tie_word_embeddings": case.tied, "torch_dtype": case.dtype}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@torch.no_grad()
def transformers_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Of the logits of the vocabulary, without the padding."""
    largest = (left[:, :VOCABULARY] - right[:, :VOCABULARY]).abs().max().item()
    print(f"largest difference of logits {largest:.1e}, of {right.abs().max():.2f}")
    return largest


@pytest.mark.parametrize("case", SAVED, ids=name_of)
def test_what_megatron_saves_transformers_computes(case: Case, tmp_path: Path) -> None:
    logits = run(tmp_path, case)
    hf = write_config(tmp_path / "config", case)
    assert sluice("megatron2hf", "--in", tmp_path / "saved", "--out", tmp_path / "hf", "--hf-config", hf) == 0
    assert difference(logits, transformers_logits(tmp_path / "hf")) < 2e-6
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert sluice("megatron2hf", "--in", tmp_path / "saved", "--out", tmp_path / "by-args") == 0
    assert same(load_folder(tmp_path / "by-args"), load_folder(tmp_path / "hf"))
    assert torch.equal(transformers_logits(tmp_path / "by-args"), transformers_logits(tmp_path / "hf"))


@pytest.mark.parametrize("case,options", LOADED, ids=name_of)
def test_what_is_converted_megatron_loads_and_computes(case: Case, options: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", case.family, tie_word_embeddings=case.tied)
    sharpen(tmp_path / "hf" / "model.safetensors")
    layout = f"--tensor-parallel {case.tensor} --pipeline-parallel {case.pipeline} --expert-parallel {case.expert} {options}"
    padding = f"--make-vocab-size-divisible-by {case.padded // case.tensor}"
    out = tmp_path / "megatron"
    assert sluice("hf2megatron", "--in", tmp_path / "hf", "--out", out, *layout.split(), *padding.split()) == 0
    logits = run(tmp_path, case._replace(load=str(out)))
    assert difference(logits, transformers_logits(tmp_path / "hf")) < 2e-6


def sharpen(path: Path) -> None:
    """Weights such as a model has, with norms about 1: large ones would make large logits, and large errors."""
    tensors = {name: 1 + 0.1 * tensor if "norm" in name else 0.1 * tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


class TestRewardHead:
    CASE = Case(tensor=2, head="rm_head")

    def test_of_a_model_that_megatron_saves(self, tmp_path: Path) -> None:
        values = run(tmp_path, self.CASE)
        hf = write_config(tmp_path / "config", self.CASE)
        assert sluice("megatron2hf", "--in", tmp_path / "saved", "--out", tmp_path / "hf", "--hf-config", hf) == 0
        assert difference(values, critic_values(tmp_path / "hf")) < 2e-6

    def test_of_a_model_that_is_converted(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        sharpen(tmp_path / "hf" / "model.safetensors")
        head = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
        tensors = load_file(tmp_path / "hf" / "model.safetensors") | {"score.weight": head}
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        options = ("--tensor-parallel", "2", "--value-head", "--make-vocab-size-divisible-by", "52")
        assert sluice("hf2megatron", "--in", tmp_path / "hf", "--out", tmp_path / "megatron", *options) == 0
        values = run(tmp_path, self.CASE._replace(load=str(tmp_path / "megatron")))
        # A value is the head's product with what the last norm gives, of which each number is known to 1e-6.
        assert difference(values, critic_values(tmp_path / "hf")) < 1e-6 * float(head.abs().sum())


@torch.no_grad()
def critic_values(folder: Path) -> torch.Tensor:
    """[TOKENS, 1], by transformers' body and head."""
    critic = hf_policy.load_critic(str(folder)).eval()
    every = torch.arange(len(TOKENS))
    packing = Packing(rows=[every[None]], cells=every)
    values = critic(input_ids=torch.tensor([TOKENS]), keep=every, position_ids=every[None], packing=packing)
    return values[:, None]


ALLOCATOR = 32 << 20  # bytes that it keeps of what was freed, and that do not grow with the model
# The kernel's count begins with the program; that of `getrusage` begins with what the parent held.
CODE = """
import sys
from launcher import cli
try:
    cli.main(sys.argv[1:])
finally:
    print(open("/proc/self/status").read())
"""


def peak(direction: str, source: Path, target: Path, *options: str) -> int:
    """Bytes that the process held at most."""
    command = [sys.executable, "-c", CODE, "convert", direction, "--in", str(source), "--out", str(target), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.long
@pytest.mark.parametrize(
    "there,back,files", [("hf2mcore", "mcore2hf", "*.safetensors"), ("hf2megatron", "megatron2hf", "*/*/*.pt")]
)
def test_peak_of_memory(there: str, back: str, files: str, tmp_path: Path) -> None:
    options = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
    write_folder(tmp_path / "small", "qwen2")
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "vocab_size": 8_000}
    write_folder(tmp_path / "large", "qwen2", **sizes)
    interpreter = peak(there, tmp_path / "small", tmp_path / "small-core", *options)
    to_core = peak(there, tmp_path / "large", tmp_path / "core", *options) - interpreter
    to_hf = peak(back, tmp_path / "core", tmp_path / "back") - interpreter
    largest = max(path.stat().st_size for path in (tmp_path / "core").glob(files))
    print(f"{there}: {to_core / largest:.2f} of the largest shard ({largest / 1e6:.0f} MB), {back}: {to_hf / largest:.2f}")
    assert largest > 40e6
    assert max(to_core, to_hf) < 1.5 * largest + ALLOCATOR
