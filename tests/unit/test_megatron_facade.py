"""megatron-core on a machine without accelerators: what it is given, and what stays as it was."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from runtime.errors import UserError
from runtime.trainer.megatron import facade

CPU = torch.device("cpu")

# In a process of its own: what it imports and changes there stays there.
ON_A_CPU = """
import sys, torch
from runtime.trainer.megatron import facade
before = torch.Tensor.cuda, torch.Tensor.type, torch.zeros, torch.cuda.current_device
facade.prepare(torch.device("cpu"))
layers = sys.modules["megatron.core.tensor_parallel.layers"]
assert layers.torch is not torch and layers.torch.nn is torch.nn
assert layers.torch.cuda.current_device() == torch.device("cpu")
assert layers.torch.zeros(2, device="cuda").device.type == "cpu"
with facade.moving(torch.device("cpu")):
    tensor = torch.zeros(1)
    assert tensor.cuda() is tensor and tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.int64).dtype == torch.int64
assert before == (torch.Tensor.cuda, torch.Tensor.type, torch.zeros, torch.cuda.current_device)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of machines without an accelerator")
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install 'sluice-rl[megatron]'"
)
def test_its_modules_alone_are_put_on_the_cpu() -> None:
    done = subprocess.run([sys.executable, "-c", ON_A_CPU], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_without_it_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing", None)
    with pytest.raises(UserError, match=r"pip install 'sluice-rl\[megatron\]'"):
        facade.prepare(CPU)


def test_npus_need_mindspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspeed", None)
    with pytest.raises(UserError, match="needs MindSpeed"):
        facade.prepare(cast(torch.device, SimpleNamespace(type="npu")))  # torch knows the name only where torch_npu is
