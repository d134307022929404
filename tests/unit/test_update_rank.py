"""What one rank of trainer or critic does with its commands, around an engine that only notes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import checkpoint, codec
from runtime.commands import Accumulate, Apply, BeginStep, ComputeValues, Save, SendWeights
from runtime.config import Config, Run
from runtime.data.prompts import StreamState
from runtime.engines.critic_rank import CriticRank
from runtime.engines.train_base import CriticEngine
from runtime.errors import InvalidMessage, UserError
from runtime.payloads import StorageFull
from runtime.position import Position
from runtime.types import PolicyVersion, StepResult, TrainGroup, ValueRequest, Values


class Engine(CriticEngine):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None

    def begin_step(self, step: int) -> None:
        self.seen.append(("begin", step))

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        self.seen.append(("accumulate", len(groups)))

    def apply(self) -> StepResult:
        return StepResult(step=4, metrics={"critic/loss": 1.0}, seconds=0.5)

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        return [Values(group_id=group.group_id, values=np.ones(2, np.float32)) for group in groups]

    def save(self, folder: str) -> None:
        self.seen.append(("save", folder))
        if self.failure is not None:
            raise self.failure

    def load(self, folder: str) -> None:
        self.seen.append(("load", folder))


def make(resume: str = "") -> tuple[CriticRank, Engine]:
    engine = Engine()
    return CriticRank(engine, Config(run=Run(name="a", resume=resume)), 0, 1), engine


def test_a_step_makes_the_next_version() -> None:
    rank, engine = make()
    assert rank.execute(BeginStep(4)) is None
    assert rank.execute(Accumulate(4, 0, [])) is None
    assert rank.version == PolicyVersion(0, 0)
    assert rank.execute(Apply(4)).metrics == {"critic/loss": 1.0}
    assert rank.version == PolicyVersion(0, 5)
    assert engine.seen == [("begin", 4), ("accumulate", 0)]


def test_values_are_encoded_one_by_one() -> None:
    rank, _ = make()
    asked = [ValueRequest(group_id=group_id, tokens=1, payload=b"") for group_id in (7, 3)]
    answer = rank.execute(ComputeValues(0, asked))
    assert [codec.decode(Values, encoded).group_id for encoded in answer] == [7, 3]


def test_what_is_another_roles_is_refused() -> None:
    rank, _ = make()
    with pytest.raises(InvalidMessage, match="a critic takes no SendWeights"):
        rank.execute(SendWeights(PolicyVersion(), 1))


def test_a_full_disk_is_told_whatever_library_met_it(tmp_path: Path) -> None:
    rank, engine = make()
    engine.failure = RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)")
    with pytest.raises(StorageFull, match=str(tmp_path)):
        rank.execute(Save(str(tmp_path)))
    engine.failure = RuntimeError("of another kind")
    with pytest.raises(RuntimeError, match="of another kind"):
        rank.execute(Save(str(tmp_path)))


def test_a_critic_goes_on_from_its_part_of_the_checkpoint(tmp_path: Path) -> None:
    stream = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
    position = Position(version=PolicyVersion(2, 9), stream=stream, trained=[])
    (tmp_path / checkpoint.POSITION).write_bytes(codec.encode(position))
    with pytest.raises(UserError, match="has no folder critic"):
        make(str(tmp_path))
    (tmp_path / checkpoint.CRITIC).mkdir()
    rank, engine = make(str(tmp_path))
    assert rank.version == PolicyVersion(2, 9)
    assert engine.seen == [("load", str(tmp_path / "critic"))]
