"""The platform's names, figures and preferences; storages on the host and back; what vLLM is told as it sleeps."""

from __future__ import annotations

import asyncio
import os
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from runtime.commands import Level, Offload, Onload
from runtime.config import Trainer
from runtime.errors import InvariantViolated, UserError
from runtime.models.adapters import HostOffload
from runtime.process import platform
from runtime.rollout.engine import EngineStats
from runtime.rollout.vllm.engine import VLLMRolloutEngine
from runtime.scoring.scorer_torch import OffloadableScorer
from runtime.trainer import rank_group
from runtime.types import Logprobs, PolicyVersion

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


def test_a_torch_npu_that_is_broken_or_not_there_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("libhccl.so: cannot open shared object file")

    def raising(name: str) -> None:
        raise error

    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(platform.importlib, "import_module", raising)
    with pytest.raises(UserError, match=r"torch_npu cannot be imported \(libhccl\.so.*source CANN's set_env\.sh"):
        platform.device()
    error = ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu")
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
    monkeypatch.setattr(rank_group.dist, "init_process_group", joins)
    monkeypatch.setattr(rank_group.dist, "TCPStore", lambda *_, **__: None)
    for name, value in {"SLUICE_STORE_KEY": "00", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    rank_group.join_group("critic", Trainer(engine=engine, backend=backend), 2, 7.0)
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
        rank_group.join_group("trainer", Trainer(engine=engine, backend=backend), 2, 7.0)
    assert str(refused.value) == f"services.trainer.backend: '{backend}' does not work on {kind}; must be one of {allowed}"


def test_dtypes() -> None:
    assert platform.resolve_dtype("auto", CPU) == torch.float32
    assert platform.resolve_dtype("auto", types.SimpleNamespace(type="npu")) == torch.bfloat16  # type: ignore[arg-type]
    assert platform.resolve_dtype("float16", CPU) == torch.float16


def test_the_random_state_is_restored() -> None:
    state = platform.rng_state(CPU)
    first = torch.rand(4)
    platform.set_rng_state(CPU, state)
    assert torch.equal(torch.rand(4), first)
    with pytest.raises(UserError, match="the saved random state is of"):
        platform.set_rng_state(CPU, {**state, "cuda": state["cpu"]})


# ------------------------------------------------------------------------------------------------ offload
@pytest.mark.parametrize("keep", [True, False])
def test_a_storage_is_gone_and_comes_back_under_all_of_its_views(keep: bool) -> None:
    buffer = torch.arange(8.0)
    left, right, single = buffer[:3], buffer[3:].view(5, 1), torch.tensor([-0.0, torch.nan], dtype=torch.bfloat16)
    before = [tensor.clone().view(torch.uint8) for tensor in (buffer, single)]
    host = HostOffload([left, right, single, torch.empty(0)], keep=keep)
    for _ in range(2):
        host.offload()
        assert [tensor.untyped_storage().nbytes() for tensor in (buffer, left, right, single)] == [0] * 4
        host.onload()
        for tensor, bits in zip((buffer, single), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), bits if keep else torch.zeros_like(bits))
    left += 1.0
    host.offload()
    host.onload()
    assert left[0] == (1.0 if keep else 0.0)


def test_what_never_changes_is_copied_once() -> None:
    frozen = torch.arange(4.0)
    host = HostOffload([frozen], frozen=True)
    host.offload()
    host.onload()
    frozen += 1.0
    host.offload()
    host.onload()
    assert torch.equal(frozen, torch.arange(4.0))


class Scorer:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.weights: Iterable[torch.Tensor] = [torch.arange(4.0)]
        self.asked = 0

    def logprobs(self, requests: object) -> list[Logprobs]:
        self.asked += 1
        assert sum(map(torch.sum, self.weights)) == 6.0
        return []


def test_a_reference_that_is_away_comes_back_for_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[torch.device] = []
    monkeypatch.setattr(platform, "release", released.append)
    scorer = Scorer("cuda")
    lent = OffloadableScorer(scorer, away=True)
    there = []
    for order in (Offload(), None, Onload(), None, Offload(), Offload(), Onload(), Onload()):
        lent.logprobs([]) if order is None else lent.handle(order)
        there.append(sum(tensor.untyped_storage().nbytes() for tensor in scorer.weights))
    assert there == [0, 16, 16, 16, 0, 0, 16, 16]
    assert (scorer.asked, released) == (2, [scorer.device] * 2)


def test_a_reference_on_cpus_stays() -> None:
    scorer = Scorer("cpu")
    lent = OffloadableScorer(scorer, away=True)
    assert scorer.logprobs([]) == lent.logprobs([]) == []


class Core:
    """Notes what it is told."""

    dead = False

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.told.append("abort")

    async def pause(self, forget: bool) -> None:
        self.told.append("pause")

    async def resume(self) -> None:
        self.told.append("resume")

    async def outstanding(self) -> list[Any]:
        return []

    async def load(self, locations: Sequence[Any], first: bool, last: bool) -> list[str]:
        self.told.append("load")
        return []

    async def sleep(self) -> None:
        self.told.append("sleep")

    async def wake(self, tags: Sequence[str]) -> None:
        self.told.append(tuple(tags))


@pytest.mark.parametrize("sleeps", [True, False])
def test_weights_come_back_first_and_vllm_goes_on_with_the_cache(sleeps: bool) -> None:
    engine = object.__new__(VLLMRolloutEngine)
    engine._core = core = Core()
    engine._sleeps, engine._level, engine._swap_timeout = sleeps, Level.AWAKE, 5.0
    engine._running, engine._withdrawn, engine.torn = {}, [], False
    engine._waiting, engine.version = deque(), PolicyVersion()
    engine._name, engine._stats = "rollout-0", EngineStats()

    async def go() -> None:
        await engine.sleep()
        with pytest.raises(InvariantViolated, match="asleep"):
            await engine.swap(PolicyVersion(0, 1))
        await engine.wake(cache=False)
        engine._staged, engine._loaded = ([], []), False
        await engine.swap(PolicyVersion(0, 1))
        await engine.wake()
        await engine.sleep()
        await engine.wake()

    asyncio.run(go())
    on_device = ["sleep", ("weights",), "load", ("kv_cache",), "sleep", ("weights", "kv_cache")]
    assert core.told == (on_device if sleeps else ["pause", "load", "resume", "pause", "resume"])
