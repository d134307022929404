"""The platform's names, figures and preferences, on whatever machine the tests run."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch

from runtime.config import Trainer
from runtime.errors import UserError
from runtime.process import platform
from runtime.trainer import rank

CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, npu: bool | None, cuda: bool) -> None:
    """`npu`: whether torch_npu finds one; None when it is not installed."""
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None if npu is None else object())
    monkeypatch.setattr(platform.importlib, "import_module", lambda name: types.ModuleType(name))
    calls: list[int] = []
    fake = types.SimpleNamespace(is_available=lambda: bool(npu), device_count=lambda: 2, set_device=calls.append)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)


@pytest.mark.parametrize(
    ("npu", "cuda", "kind"),
    [(True, True, "npu"), (False, True, "cuda"), (None, True, "cuda"), (False, False, "cpu"), (None, False, "cpu")],
)
def test_npu_is_preferred_to_cuda_to_cpu(monkeypatch: pytest.MonkeyPatch, npu: bool | None, cuda: bool, kind: str) -> None:
    pretend(monkeypatch, npu, cuda)
    assert platform.device_kind() == kind


def test_a_device_that_is_not_there_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, False)
    assert platform.device() == platform.device("cpu", 3) == CPU
    with pytest.raises(UserError, match="device cuda:0: this machine has 0 cuda"):
        platform.device("cuda")
    with pytest.raises(UserError, match="'tpu': must be one of auto, npu, cuda, cpu"):
        platform.device("tpu")


def test_a_broken_torch_npu_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(platform.importlib, "import_module", broken)
    with pytest.raises(UserError, match=r"torch_npu cannot be imported \(libhccl\.so.*source CANN's set_env\.sh"):
        platform.device()


def test_a_torch_npu_that_is_not_there_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu")

    monkeypatch.setattr(platform.importlib, "import_module", absent)
    with pytest.raises(UserError, match=r"No module named 'torch_npu'\); install it \("):
        platform.device("npu")


@pytest.mark.parametrize(("kind", "own"), [("npu", "hccl"), ("cuda", "nccl"), ("cpu", "gloo")])
def test_the_collective_backend_follows_the_device(kind: str, own: str) -> None:
    where = types.SimpleNamespace(type=kind)
    assert platform.collective_backend("auto", where) == platform.collective_backend(own, where) == own  # type: ignore[arg-type]
    assert platform.collective_backend("gloo", where) == "gloo"  # type: ignore[arg-type]
    other = "hccl" if own == "nccl" else "nccl"
    with pytest.raises(UserError, match=rf"backend: '{other}' does not work on {kind}; must be one of auto, {own}"):
        platform.collective_backend(other, where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "engine", "backend", "joined"),
    [
        ("cpu", "torch", "auto", "gloo"),
        ("cuda", "torch", "auto", "nccl"),
        ("cuda", "torch", "gloo", "gloo"),
        ("cuda", "megatron", "nccl", "nccl"),
        ("npu", "torch", "hccl", "hccl"),
    ],
)
def test_a_groups_backend_is_its_role(
    monkeypatch: pytest.MonkeyPatch, kind: str, engine: Any, backend: Any, joined: str
) -> None:
    seen = []
    monkeypatch.setattr(platform, "device", lambda index: types.SimpleNamespace(type=kind))
    joins = lambda name, **how: seen.append((name, how["timeout"].total_seconds()))  # noqa: E731
    monkeypatch.setattr(rank.dist, "init_process_group", joins)
    monkeypatch.setattr(rank.dist, "TCPStore", lambda *_, **__: None)
    for name, value in {"SLUICE_STORE_KEY": "00", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    rank.join_group("critic", Trainer(engine=engine, backend=backend), 2, 7.0)
    assert seen == [(joined, 7.0)]
    assert "SLUICE_STORE_KEY" not in os.environ, "no child of a rank is told the key"


@pytest.mark.parametrize(
    ("kind", "engine", "backend", "allowed"),
    [
        ("cpu", "torch", "nccl", "auto, gloo"),
        ("cuda", "torch", "hccl", "auto, nccl, gloo"),
        ("cuda", "megatron", "gloo", "auto, nccl"),  # which has no sends between devices
        ("npu", "torch", "gloo", "auto, hccl"),  # of whose devices gloo knows nothing
        ("npu", "megatron", "nccl", "auto, hccl"),
    ],
)
def test_a_groups_backend_that_its_device_has_not_is_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: str, engine: Any, backend: Any, allowed: str
) -> None:
    monkeypatch.setattr(platform, "device", lambda index: types.SimpleNamespace(type=kind))
    with pytest.raises(UserError) as refused:
        rank.join_group("trainer", Trainer(engine=engine, backend=backend), 2, 7.0)
    assert str(refused.value) == f"services.trainer.backend: '{backend}' does not work on {kind}; must be one of {allowed}"


def test_dtypes() -> None:
    assert platform.resolve_dtype("auto", CPU) == torch.float32
    assert platform.resolve_dtype("auto", types.SimpleNamespace(type="npu")) == torch.bfloat16  # type: ignore[arg-type]
    assert platform.resolve_dtype("float16", CPU) == torch.float16


def test_memory_is_plausible() -> None:
    figures = platform.memory(CPU)
    assert 0 < figures.available <= figures.total


def test_the_random_state_is_restored() -> None:
    state = platform.rng_state(CPU)
    first = torch.rand(4)
    platform.set_rng_state(CPU, state)
    assert torch.equal(torch.rand(4), first)
    with pytest.raises(UserError, match="the saved random state is of"):
        platform.set_rng_state(CPU, {**state, "cuda": state["cpu"]})
