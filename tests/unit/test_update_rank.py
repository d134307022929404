"""What one rank of trainer or critic does with its commands, around an engine that only notes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime import codec
from runtime.commands import Accumulate, Apply, BeginStep, ComputeValues, Offload, Onload, Restore, Save
from runtime.config import Checkpoint, Config, Critic, Run, Services, Trainer
from runtime.data.prompts import StreamState
from runtime.errors import ServiceFault, StorageFull, UserError
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank import CriticRank
from runtime.trainer.step import ModelTrainer
from runtime.types import PolicyVersion, StepResult, TrainGroup, ValueRequest, Values


class Engine(ModelTrainer):
    def __init__(self) -> None:
        self.backend: Any = SimpleNamespace(rank_info=RankInfo(0, 1, torch.device("cpu")))
        self.seen: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.may_write = threading.Event()
        self.may_write.set()

    def begin_step(self, step: int) -> None:
        self.seen.append(("begin", step))

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        self.seen.append(("accumulate", len(groups), last))

    def apply(self) -> StepResult:
        return StepResult(metrics={"critic/loss": 1.0}, seconds=0.5)

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        return [Values(group_id=group.group_id, values=np.ones(2, np.float32)) for group in groups]

    def begin_save(self, folder: str) -> Callable[[], None]:
        self.seen.append(("save", folder))

        def write() -> None:
            assert self.may_write.wait(60.0)
            if self.failure is not None:
                raise self.failure

        return write

    def offload(self) -> None:
        self.seen.append(("offload",))

    def onload(self) -> None:
        self.seen.append(("onload",))

    def load(self, folder: str) -> None:
        self.seen.append(("load", folder))


def make(**settings: Any) -> tuple[CriticRank, Engine]:
    engine, saved = Engine(), Checkpoint(async_save=settings.pop("async_save", False))
    services = Services(critic=Trainer(**settings))
    config = Config(run=Run(name="a"), services=services, critic=Critic(), checkpoint=saved)
    return CriticRank(engine, config), engine


def test_a_step_makes_the_next_version() -> None:
    rank, engine = make()
    assert rank.execute(BeginStep(4)) is None
    assert rank.execute(Accumulate(4, [], True)) is None
    assert rank.version == PolicyVersion(0, 0)
    engine.phases = {"timing/adv": 0.25}
    assert rank.execute(Apply(4)).metrics == {"critic/loss": 1.0, "timing/adv": 0.25}
    assert rank.version == PolicyVersion(0, 5)
    assert engine.seen == [("begin", 4), ("accumulate", 0, True)]


@pytest.mark.parametrize("failing", ["accumulate", "apply"])
def test_commands_behind_one_that_failed_say_what_it_said(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were ordered ahead. Nothing of a step is applied without all of its batch, and the first fault is the one told."""
    rank, engine = make()
    fault = ServiceFault("critic", failing, "the loss is NaN")

    def fail(*_: Any) -> StepResult:
        raise fault

    with monkeypatch.context() as patched:
        patched.setattr(engine, failing, fail)
        rank.execute(BeginStep(0))
        with pytest.raises(ServiceFault):
            rank.execute(Accumulate(0, [], True))
            rank.execute(Apply(0))
    for behind in (Accumulate(0, [], True), Apply(0), BeginStep(1)):
        with pytest.raises(ServiceFault) as caught:
            rank.execute(behind)
        assert caught.value is fault
    assert rank.version == PolicyVersion(0, 0) and ("begin", 1) not in engine.seen


def test_values_are_encoded_one_by_one() -> None:
    rank, _ = make()
    asked = [ValueRequest(group_id=group_id, tokens=1, payload=b"") for group_id in (7, 3)]
    answer = rank.execute(ComputeValues(asked))
    assert [codec.decode(Values, encoded).group_id for encoded in answer] == [7, 3]


def test_a_full_disk_is_told_whatever_library_met_it(tmp_path: Path) -> None:
    rank, engine = make()
    engine.failure = RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)")
    with pytest.raises(StorageFull, match=str(tmp_path)):
        rank.execute(Save(str(tmp_path)))
    engine.failure = RuntimeError("of another kind")
    with pytest.raises(RuntimeError, match="of another kind"):
        rank.execute(Save(str(tmp_path)))


def test_a_checkpoint_is_written_beside_the_next_commands(tmp_path: Path) -> None:
    rank, engine = make(async_save=True)
    engine.may_write.clear()
    saving = rank.execute(Save(str(tmp_path)))
    rank.execute(BeginStep(4))
    assert engine.seen == [("save", str(tmp_path)), ("begin", 4)]
    assert not saving.done()
    engine.may_write.set()
    assert saving.result(60.0) == []
    assert "timing/critic_save" in rank.execute(Apply(4)).metrics
    assert "timing/critic_save" not in rank.execute(Apply(5)).metrics
    engine.failure = OSError("No space left on device")
    with pytest.raises(StorageFull, match=str(tmp_path)):
        rank.execute(Save(str(tmp_path))).result(60.0)
    engine.failure = None
    assert rank.execute(Save(str(tmp_path))).result(60.0) == [], "the next one is another"


def test_the_state_is_away_between_steps(tmp_path: Path) -> None:
    rank, engine = make(engine="megatron", offload_train_optimizer=True)
    step = [BeginStep(0), Accumulate(0, [], True), Apply(0)]
    for command in (*step, ComputeValues([]), Save(str(tmp_path)), BeginStep(1)):
        answer = rank.execute(command)
        if command == step[-1]:
            assert "timing/critic_onload" not in answer.metrics
    whole = [("begin", 0), ("accumulate", 0, True), ("offload",), ("onload",), ("save", str(tmp_path)), ("offload",)]
    assert engine.seen == [*whole, ("onload",), ("begin", 1)]
    metrics = rank.execute(Apply(1)).metrics
    assert {"timing/critic_onload", "timing/critic_offload"} <= metrics.keys()


def test_where_the_device_is_anothers_as_well_the_coordinator_says_when(tmp_path: Path) -> None:
    rank, engine = make(colocate="trainer", offload_train_optimizer=True)
    assert engine.seen == [("offload",)]
    for command in (Offload(), Onload(), Onload(), BeginStep(0), Apply(0)):
        rank.execute(command)
    assert engine.seen == [("offload",), ("onload",), ("begin", 0)]
    rank.execute(Offload())
    rank.execute(ComputeValues([]))
    assert engine.seen[3:] == [("offload",)]
    rank.execute(Save(str(tmp_path)))  # which needs it, and leaves it for the next order
    assert engine.seen[4:] == [("onload",), ("save", str(tmp_path))]


def test_a_critic_goes_on_from_its_part_of_the_checkpoint(tmp_path: Path) -> None:
    stream = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
    position = Position(version=PolicyVersion(2, 9), stream=stream, trained=[])
    (tmp_path / checkpoint.POSITION).write_bytes(codec.encode(position))
    rank, engine = make()
    with pytest.raises(UserError, match="has no folder critic"):
        rank.execute(Restore(str(tmp_path)))
    (tmp_path / checkpoint.CRITIC).mkdir()
    rank.execute(Restore(str(tmp_path)))
    assert rank.version == PolicyVersion(2, 9)
    assert engine.seen == [("load", str(tmp_path / "critic"))]
