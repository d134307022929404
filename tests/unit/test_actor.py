"""The actor's requests and its task: order, withdrawal, its own work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from runtime.commands import Priority
from services.model_service import Actor, Request
from tests.unit.actor_desk import Desk, keeper, run, running, settle

# ----------------------------------------------------------------------------------------------------- order


def test_control_goes_before_data_and_each_keeps_its_order() -> None:
    async def test() -> None:
        desk = Desk()
        actor = Actor("desk", desk)
        futures = [
            actor.send(message, priority=Priority.CONTROL if message.isupper() else Priority.DATA) for message in "abAcBd"
        ]
        async with running(actor):
            assert await asyncio.gather(*futures) == list("abAcBd")
        assert desk.seen == [["A"], ["B"], ["a"], ["b"], ["c"], ["d"]]

    run(test())


def test_control_that_arrives_between_two_data_requests_goes_first() -> None:
    async def test() -> None:
        futures = []

        async def serve(requests: Sequence[Request]) -> None:
            if requests[0].message == "first":
                futures.append(actor.send("control", priority=Priority.CONTROL))
            requests[0].reply()

        desk = Desk(serve)
        actor = Actor("desk", desk)
        futures += [actor.send("first"), actor.send("second")]
        async with running(actor):
            await asyncio.gather(*futures[:2])
        assert desk.seen == [["first"], ["control"], ["second"]]

    run(test())


def test_data_is_handed_over_in_batches_and_control_one_by_one() -> None:
    async def test() -> None:
        desk = Desk()
        actor = Actor("desk", desk, batch=3)
        futures = [actor.send(number) for number in range(7)]
        futures += [actor.send(name, priority=Priority.CONTROL) for name in "AB"]
        async with running(actor):
            await asyncio.gather(*futures)
        assert desk.seen == [["A"], ["B"], [0, 1, 2], [3, 4, 5], [6]]

    run(test())


# -------------------------------------------------------------------------------------- withdrawn requests


def test_a_withdrawn_request_is_never_handed_over() -> None:
    async def test() -> None:
        desk = Desk()
        actor = Actor("desk", desk, batch=8)
        futures = [actor.send(name) for name in "abc"]
        futures[1].cancel()
        async with running(actor):
            assert await asyncio.gather(futures[0], futures[2]) == ["a", "c"]
        assert desk.seen == [["a", "c"]]

    run(test())


def test_the_answer_to_a_request_that_was_withdrawn_meanwhile_is_dropped() -> None:
    async def test() -> None:
        desk = keeper()
        actor = Actor("desk", desk)
        async with running(actor):
            future = actor.send("a")
            await settle()
            assert not desk.kept["a"].abandoned
            future.cancel()
            assert desk.kept["a"].abandoned
            desk.kept["a"].reply("late")
            desk.kept["a"].fail(ValueError("later still"))
            await settle()
            assert future.cancelled()

    run(test())


# ------------------------------------------------------------------------------------------------- the actor's own work


def test_advance_runs_while_there_is_work_and_mail_comes_first() -> None:
    async def test() -> None:
        order: list[str] = []

        class Worker(Desk):
            async def advance(self, interrupted: Callable[[], bool]) -> None:
                assert not interrupted()
                order.append("advance")
                await super().advance(interrupted)

        async def serve(requests: Sequence[Request]) -> None:
            order.append(requests[0].message)
            worker.work = 2
            requests[0].reply()

        worker = Worker(serve)
        actor = Actor("worker", worker)
        futures = [actor.send("a"), actor.send("b")]
        async with running(actor):
            await asyncio.gather(*futures)
            await settle()
            assert order == ["a", "b", "advance", "advance"]

    run(test())


def test_an_engine_thread_learns_of_mail_and_returns_early() -> None:
    async def test() -> None:
        started = asyncio.Event()
        seen: list[bool] = []

        class Engine(Desk):
            async def advance(self, interrupted: Callable[[], bool]) -> None:
                loop = asyncio.get_running_loop()

                def decode() -> None:
                    seen.append(interrupted())
                    loop.call_soon_threadsafe(started.set)
                    step = threading.Event()
                    for _ in range(100_000):
                        if interrupted():
                            seen.append(True)
                            return
                        step.wait(0.001)

                await asyncio.to_thread(decode)
                self.work -= 1

        engine = Engine()
        engine.work = 1
        actor = Actor("engine", engine)
        async with running(actor):
            await started.wait()
            assert not actor.interrupted()
            assert await asyncio.wait_for(actor.send("mail"), 30.0) == "mail"
        assert seen == [False, True]
        assert not actor.interrupted()

    run(test())
