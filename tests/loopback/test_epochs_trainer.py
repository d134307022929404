"""The trainer in epochs: it opens a rendezvous beside its engine, says who does not come, and sends what it gathered."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from runtime.commands import AbortWeights, HostWeights, JoinWeights, SendWeights
from runtime.errors import Cancelled, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights import group, rendezvous
from tests.loopback.test_epochs import DEADLINE, PUBLICATION, RolloutHere, Stage, run, until


@pytest.mark.parametrize("transport", ["collective", "shared_memory", "files"])
def test_who_does_not_come_to_the_rendezvous_is_named_to_those_who_do(transport: str, tmp_path: Path) -> None:
    async def test(here: Stage) -> None:
        hosted = await here.trainer.call(HostWeights(1, 3, transport, ("trainer-0", "rollout-0", "rollout-1")))
        with pytest.raises(ServiceFault, match=r"rollout-0: rendezvous: rank 2 \(rollout-1\) did not join|trainer-0\) is gone"):
            await here.rollouts[0].call(JoinWeights(replace(hosted.address, rank=1), hosted.manifest))
        with pytest.raises(ServiceFault, match=r"trainer-0: rendezvous: rank 2 \(rollout-1\) did not join"):
            await here.trainer.call(SendWeights(PolicyVersion(0, 1), 1))

    run(test, replace(PUBLICATION, join_timeout=2.0, folder=str(tmp_path)))


def test_the_trainer_answers_while_it_opens_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, answered, host = threading.Event(), threading.Event(), rendezvous.host

    def slow(*arguments: Any) -> group.PendingGroup:
        opening.set()
        assert answered.wait(DEADLINE / 2), "the event loop waits for the store"
        return host(*arguments)

    monkeypatch.setattr(rendezvous, "host", slow)

    async def test(here: Stage) -> None:
        publishing = asyncio.create_task(here.publish(1))
        await until(opening.is_set)
        answered.set()
        await publishing

    run(test)


def test_an_epoch_that_is_given_up_while_its_rendezvous_is_opened_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, may_open, host, opened = threading.Event(), threading.Event(), rendezvous.host, []

    def slow(epoch: int, *arguments: Any) -> group.PendingGroup:
        if epoch == 1:
            opening.set()
            assert may_open.wait(DEADLINE / 2)
        opened.append(host(epoch, *arguments))
        return opened[-1]

    monkeypatch.setattr(rendezvous, "host", slow)

    async def test(here: Stage) -> None:
        hosting = asyncio.ensure_future(here.trainer.call(HostWeights(1, 2, "collective", ("trainer-0", "rollout-0"))))
        await until(opening.is_set)
        await here.trainer.call(AbortWeights(PolicyVersion(), 1))  # it is answered meanwhile
        publishing = asyncio.ensure_future(here.publisher.group.open())  # of the number 1 again: it waits for its turn
        await asyncio.sleep(0)
        may_open.set()
        with pytest.raises(Cancelled, match="trainer-0: epoch 1 was given up"):
            await hosting
        await publishing
        assert (await here.publish(1)).epoch == 1
        assert len(opened) == 2

    run(test)


def test_weights_that_changed_in_the_senders_memory_are_gathered_anew_before_they_are_sent_again() -> None:
    async def test(here: Stage) -> None:
        await here.publish(1)
        dying = here.rollouts[1]
        here.trainer.rank.member.sender._buffers[1][0] ^= 1
        dying.cut()
        await until(lambda: here.publisher.group.epoch.number == 2 and not here.publisher._lock.locked())
        late = RolloutHere("rollout-1", incarnation=1)
        here.rollouts[0].service.weights.staging.receiver.held = None  # so that it is not the other one who sends it
        await here.comes(late)
        await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
        assert late.engine.swapped == [1]  # which it checks
        assert here.trainer.engine.gathered == [1, 1]

    run(test)
