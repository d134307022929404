"""A process's calls: counted, drained at its end, and logged where it is their fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from runtime.errors import ServiceFault
from runtime.types import LogprobRequest
from services.process import Calls
from services.rpc import contract
from tests.unit.actor_desk import run, settle

DATA = contract.METHODS["Reference", "Logprobs"]
CONTROL = contract.METHODS["Rollout", "CommitWeights"]
REQUEST = LogprobRequest(group_id=1, payload=b"")


class Handled:
    """Calls whose answers the test gives."""

    def __init__(self) -> None:
        self.calls = Calls("desk")
        self.answers: list[asyncio.Future[Any]] = []

    def begin(self, method: contract.Method = DATA) -> asyncio.Future[Any]:
        def handler(_: Any) -> Awaitable[Any]:
            self.answers.append(asyncio.get_running_loop().create_future())
            return self.answers[-1]

        answer = self.calls.counted(method, handler)(REQUEST)
        assert isinstance(answer, asyncio.Future)
        return answer

    @property
    def counts(self) -> tuple[int, int, int, int]:
        stats = self.calls.stats
        return stats.open, stats.answered, stats.failed, stats.withdrawn


def test_each_call_is_counted_by_how_it_ended() -> None:
    async def test() -> None:
        handled = Handled()
        answered, failed, withdrawn, _ = (handled.begin() for _ in range(4))
        handled.answers[0].set_result(1)
        handled.answers[1].set_exception(ServiceFault("desk", "serve", "closed"))
        withdrawn.cancel()
        await settle()
        assert handled.counts == (1, 1, 1, 1)
        assert (await answered, handled.answers[2].cancelled(), failed.exception() is None) == (1, True, False)

    run(test())


def test_while_it_drains_data_is_not_answered_and_what_came_before_is_waited_for() -> None:
    async def test() -> None:
        handled = Handled()
        kept = handled.begin()
        draining = asyncio.create_task(handled.calls.drain(60.0))
        await settle()
        late = handled.begin()
        assert len(handled.answers) == 1
        handled.begin(CONTROL)
        handled.answers[1].set_result(None)
        await settle()
        assert not draining.done()
        handled.answers[0].set_result("done")
        await draining
        assert await kept == "done"
        assert not late.done()

    run(test())


def test_what_is_still_open_when_the_time_is_over_is_withdrawn(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handled = Handled()
        kept = handled.begin()
        await handled.calls.drain(0.0)
        assert kept.cancelled()
        await handled.calls.drain(0.0)  # of one that is idle, at once

    run(test())
    assert [record.getMessage() for record in caplog.records] == ["desk: 1 calls were dropped at the end"]


def test_what_is_no_error_of_ours_is_logged_once_with_the_place_where_it_was_raised(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handled = Handled()
        calls = [handled.begin() for _ in range(4)]
        try:
            raise AttributeError("no attribute 'nosuch'")
        except AttributeError as error:
            theirs = error
        for answer, error in zip(handled.answers, [ServiceFault("desk", "serve", "closed")] * 2 + [theirs] * 2, strict=True):
            answer.set_exception(error)
        await asyncio.wait(calls)
        for call in calls:
            call.exception()

    run(test())
    (record,) = caplog.records
    assert record.getMessage() == "desk: Logprobs failed"
    assert "no attribute 'nosuch'" in caplog.text and "in test" in caplog.text
