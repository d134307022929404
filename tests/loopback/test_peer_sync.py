"""A late rollout is brought up to date by another one, over real gloo or shared memory: who sends, and who refuses."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.commands import HostWeights, ResendWeights, SendWeights
from runtime.coordinator.sync_group import nearest
from runtime.errors import ServiceFault
from runtime.types import PolicyVersion
from tests.loopback.losable import Losable
from tests.loopback.test_epochs import PUBLICATION, RolloutHere, Stage, run, until
from tests.loopback.test_epochs import apart as apart


def counted(here: Stage) -> list[Any]:
    """The trainer's commands to send, from now on."""
    sends, begin = [], here.trainer.begin

    def noted(command: Any) -> Any:
        if isinstance(command, SendWeights | ResendWeights):
            sends.append(command)
        return begin(command)

    here.trainer.begin = noted  # type: ignore[method-assign]
    return sends


async def come(here: Stage, incarnation: int = 0) -> RolloutHere:
    late = RolloutHere("rollout-2", incarnation=incarnation)
    await here.comes(late)
    await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
    assert late.engine.swapped == [here.pool.membership.committed.step]  # which it checks
    return late


@pytest.mark.parametrize("adopts", ["float32", ""], ids=["uses the buckets", "copies them"])
def test_whoever_serves_sends_the_version_as_often_as_somebody_comes(adopts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(here: Stage) -> None:
        for rollout in here.rollouts:
            monkeypatch.setattr(rollout.engine, "adopts", adopts)
        await here.publish(1)
        sends = counted(here)
        (await come(here)).cut()
        await until(lambda: not here.pool.membership.stale and not here.publisher._lock.locked())
        await come(here, incarnation=1)
        assert sends == []
        assert [rollout.engine.swapped for rollout in here.rollouts[:2]] == [[1], [1]]
        await here.publish(2)
        assert [rollout.engine.swapped[-1] for rollout in (*here.rollouts[:2], here.rollouts[3])] == [2, 2, 2]
        await until(lambda: not here.publisher._lock.locked())
        assert len(sends) == 1

    run(test)


@pytest.mark.parametrize("why", ["what it has changed in its memory", "it keeps nothing"])
def test_the_trainer_brings_it_where_the_peer_cannot(why: str) -> None:
    async def test(here: Stage) -> None:
        await here.publish(1)
        receiver = here.rollouts[0].service.weights.staging.receiver
        if why == "it keeps nothing":
            receiver.held = None
        else:
            receiver.held._set.buffers[1][0] ^= 1
        sends = counted(here)
        await come(here)
        assert sends == [ResendWeights(PolicyVersion(0, 1), here.publisher.group.epoch.number)]
        assert len(here.pool.serving) == 3  # whoever refuses is not lost

    run(test)


def test_another_version_than_the_one_that_it_has_is_refused() -> None:
    async def test(here: Stage) -> None:
        await here.publish(1)
        peer = here.rollouts[0]
        await peer.call(HostWeights(9, 2, "collective", ("rollout-0", "rollout-2")))
        with pytest.raises(ServiceFault, match=r"rollout-0: snapshot: version 0\.0 was not kept: 0\.1 is there"):
            await peer.call(ResendWeights(PolicyVersion(0, 0), 9))

    run(test, PUBLICATION)


class At(Losable):
    def __init__(self, name: str, machine: str):
        super().__init__()
        self.name, self.machine = name, machine


@pytest.mark.parametrize(
    ("late", "serving", "trainer", "peer"),
    [
        ("a", "ba", "c", 1),  # on its machine
        ("a", "bc", "d", 0),  # nobody near
        ("a", "bc", "a", None),  # the trainer is near, and alone so
        ("a", "ba", "a", 1),
        ("ab", "cb", "a", 1),
        ("a", "", "b", None),
    ],
)
def test_the_nearest_one_sends(late: str, serving: str, trainer: str, peer: int | None) -> None:
    newcomers = [At(f"late-{machine}", machine) for machine in late]
    there: list[Any] = [At(f"rollout-{machine}", machine) for machine in serving]
    assert nearest(newcomers, there, list(trainer)) is (None if peer is None else there[peer])  # type: ignore[arg-type]
