"""The command relay between real processes: rank 0 or a follower is here, the others are children."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from msgspec import Struct

from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.spmd import Relay
from runtime.weights.sender import in_thread
from tests.loopback.ranks import Helper, heard

DEADLINE = 8.0  # of the relays: a machine may be busy
PATIENCE = 100.0


class Begin(Struct, tag="begin", frozen=True):
    step: int


class Load(Struct, tag="load"):
    values: np.ndarray  # float32 [any]


Commands = Begin | Load


def connect(store: Any, rank: int, world_size: int, **options: Any) -> Relay[Any]:
    settings: dict[str, Any] = {"heartbeat": 0.1, "deadline": DEADLINE, "join_timeout": PATIENCE} | options
    return Relay(store, rank, world_size, Commands, name="trainer", interface="127.0.0.1", **settings)


def open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))


# --------------------------------------------------------------------------------------- a rank in its own process


def child(connection: Any) -> None:
    """A rank for each time that it is told (port, rank, world size), which says what it receives.

    As rank 0 it sends `Begin(1)` and stays until it is told more.
    """
    words = heard(connection)
    for port, rank, world_size in words:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
        relay = connect(store, rank, world_size)
        connection.send("connected")
        if rank == 0:
            relay.send(Begin(1))
            next(words)
        else:
            try:
                while (command := relay.receive()) is not None:
                    connection.send(
                        ("begin", command.step) if isinstance(command, Begin) else ("load", float(command.values.sum()))
                    )
                connection.send("end")
            except ServiceFault as fault:
                connection.send(("fault", str(fault)))
        relay.close()


class Child(Helper):
    def __init__(self) -> None:
        super().__init__(child)

    def signal(self, how: signal.Signals) -> None:
        os.kill(self.process.pid, how)


@pytest.fixture(scope="module")
def started() -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for one in children:
        one.end()


@pytest.fixture
def pool(started: list[Child]) -> list[Child]:
    """Two children: those of the test before, unless it has killed them."""
    started[:] = [one for one in started if one.process.is_alive()]
    started.extend(Child() for _ in range(2 - len(started)))
    return list(started)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lead(stack: ExitStack, children: list[Child], **options: Any) -> Relay[Any]:
    store = open_store()
    for rank, one in enumerate(children, 1):
        one.tell(store.port, rank, 3)
    relay = connect(store, 0, 3, **options)
    stack.callback(relay.close)
    assert [one.hear() for one in children] == ["connected"] * 2
    return relay


def test_commands_arrive_in_order_and_then_the_end(stack: ExitStack, pool: list[Child]) -> None:
    relay = lead(stack, pool)
    relay.send(Begin(7))
    relay.send(Load(np.full(100_000, 0.5, np.float32)))  # far over one block
    relay.send(Load(np.full(254, 2, np.float32)))  # about one block
    relay.send(Begin(8))
    relay.close()
    for one in pool:
        assert [one.hear() for _ in range(5)] == [("begin", 7), ("load", 50_000.0), ("load", 508.0), ("begin", 8), "end"]


def test_what_is_sent_aside_goes_past_what_waits() -> None:
    store, past, there = open_store(), list[Any](), threading.Event()

    def aside(command: Any) -> None:
        past.append(command.step)
        there.set()

    joining = in_thread("follower", lambda: connect(store.clone(), 1, 2, on_aside=aside))
    relay = connect(store, 0, 2)
    follower = joining.result(PATIENCE)
    try:
        for step in (1, 2):
            relay.send(Begin(step))
        relay.send(Begin(3), aside=True)
        assert there.wait(PATIENCE)
        relay.send(Begin(4))
        assert [follower.receive(PATIENCE) for _ in range(3)] == [Begin(1), Begin(2), Begin(4)]
        assert past == [3]
    finally:
        relay.close()
        follower.close()


def test_a_stopped_follower_is_named_within_the_deadline(stack: ExitStack, pool: list[Child]) -> None:
    noticed = threading.Event()
    relay = lead(stack, pool, on_fault=lambda _: noticed.set())
    stopped, other = pool
    stopped.signal(signal.SIGSTOP)
    try:
        assert noticed.wait(PATIENCE)
        with pytest.raises(DeadlineExceeded, match="trainer rank 1: relay: silent"):
            relay.send(Begin(1))
        kind, text = other.hear()
        assert kind == "fault" and "trainer rank 1: relay" in text
    finally:
        stopped.signal(signal.SIGCONT)
    assert stopped.hear()[0] == "fault"


def follow(stack: ExitStack, leader: Child) -> Relay[Any]:
    store = open_store()
    leader.tell(store.port, 0, 2)
    relay = connect(store, 1, 2)
    stack.callback(relay.close)
    assert leader.hear() == "connected"
    assert relay.receive(PATIENCE) == Begin(1)
    return relay


def test_a_stopped_rank_0_is_noticed_within_the_deadline(stack: ExitStack, pool: list[Child]) -> None:
    relay = follow(stack, pool[0])
    with pytest.raises(DeadlineExceeded, match="trainer rank 1: command: none came"):
        relay.receive(DEADLINE + 0.3)  # longer than the deadline: the beats keep it up
    pool[0].signal(signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match="trainer rank 0: relay: silent"):
            relay.receive()
    finally:
        pool[0].signal(signal.SIGCONT)
    with pytest.raises(ServiceFault, match="trainer rank 0"):
        relay.receive()
    pool[0].tell(0)  # it may go


def test_a_killed_follower_is_named_by_everyone(stack: ExitStack, pool: list[Child]) -> None:
    faults: list[ServiceFault] = []
    noticed = threading.Event()
    relay = lead(stack, pool, on_fault=lambda fault: (faults.append(fault), noticed.set()))
    other, killed = pool
    killed.end()
    assert noticed.wait(PATIENCE)
    assert "trainer rank 2: relay: lost" in str(faults[0])
    with pytest.raises(ServiceFault, match="trainer rank 2: relay"):
        relay.send(Begin(9))
    kind, text = other.hear()
    assert kind == "fault" and "trainer rank 2: relay" in text


def test_a_killed_rank_0_is_noticed_at_once(stack: ExitStack, pool: list[Child]) -> None:
    leader = pool[0]
    stack.callback(leader.end)
    relay = follow(stack, leader)
    leader.process.kill()
    with pytest.raises(ServiceFault, match="trainer rank 0: relay: lost"):
        relay.receive()


# ------------------------------------------------------------------------------------------- cheap cases, in threads


def test_close_ends_the_followers_after_the_last_command() -> None:
    store = open_store()
    joining = in_thread("join", lambda: connect(store.clone(), 1, 2))
    leader = connect(store, 0, 2)
    follower = joining.result(PATIENCE)
    for step in range(200):
        leader.send(Begin(step))
    leader.close()
    assert [follower.receive(PATIENCE) for _ in range(200)] == [Begin(step) for step in range(200)]
    assert follower.receive(PATIENCE) is None
    assert follower.receive(PATIENCE) is None
    follower.close()


def test_a_relay_of_one_rank_takes_commands() -> None:
    relay = connect(open_store(), 0, 1)
    relay.send(Begin(1))
    relay.close()


def test_missing_ranks_are_named() -> None:
    with pytest.raises(ServiceFault, match="trainer rank 0: rendezvous: trainer rank 1, trainer rank 2 did not join"):
        connect(open_store(), 0, 3, join_timeout=0.3)


def test_a_heartbeat_too_slow_for_the_deadline_is_refused() -> None:
    with pytest.raises(ValueError, match="quarter"):
        connect(open_store(), 0, 1, heartbeat=0.5, deadline=1.0)
