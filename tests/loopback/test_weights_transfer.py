"""Transfers of weights over gloo between threads: who waits for whom, deadlines, aborts, and versions kept apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch

from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup
from runtime.weights.receiver import WeightReceiver
from runtime.weights.sender import WeightSender
from tests.loopback.weight_aborts import Aborts, connected
from tests.loopback.weight_cases import MANIFEST, fill, same, settles, threads_and_files


@pytest.fixture
def pair() -> Iterator[list[WeightGroup]]:
    groups = connected(timeout=1.0)
    try:
        yield groups
    finally:
        for group in groups:
            group.abort()


def test_a_reception_waits_past_its_deadline_and_the_rendezvous_timeout_for_the_sender(pair: list[WeightGroup]) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    reception = receiver.receive(pair[1], PolicyVersion(0, 1), 0.5)
    with pytest.raises(TimeoutError):
        wait(reception, 1.3)
    fill(sender.views(1.0), 1)
    sender.send(pair[0], PolicyVersion(0, 1), 5.0).result(5)
    assert same(reception.result(5).tensors(), 1)


def wait(future: Future[Any], seconds: float) -> Any:
    """`future.result`, with the one TimeoutError of all supported Pythons."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(seconds):
        raise TimeoutError
    return future.result()


def test_a_transfer_that_stalls_ends_at_the_receivers_deadline(pair: list[WeightGroup]) -> None:
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(0, 1), 0.3)
    pair[0].announce(PolicyVersion(0, 1))
    with pytest.raises(DeadlineExceeded, match="rollout-1: transfer: bucket 0 of") as caught:
        reception.result(5)
    assert caught.value.deadline == 0.3


@pytest.mark.parametrize("announced", [False, True], ids=["before", "during"])
def test_abort_frees_a_blocked_reception_at_once(pair: list[WeightGroup], announced: bool) -> None:
    receiver = WeightReceiver(MANIFEST)
    reception = receiver.receive(pair[1], PolicyVersion(0, 1), 60.0)
    if announced:
        pair[0].announce(PolicyVersion(0, 1))
    with pytest.raises(TimeoutError):
        wait(reception, 0.1)
    began = time.monotonic()
    receiver.abort()
    with pytest.raises(Cancelled, match=r"version 0\.1 was withdrawn"):
        reception.result(5)
    assert time.monotonic() - began < 0.5


class Forgotten:
    """A gloo group that has lost track of a broadcast: it never ends, and the group's own end waits for it."""

    def __init__(self, begun: threading.Event, freed: threading.Event) -> None:
        self._begun, self._freed = begun, freed

    def broadcast(self, buffer: torch.Tensor, root: int) -> Endless:
        self._begun.set()
        return Endless(self._freed)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """It has forgotten that too."""

    def __del__(self) -> None:
        self._freed.wait(10)


class Endless:
    def __init__(self, freed: threading.Event) -> None:
        self._freed = freed

    def wait(self, timeout: timedelta) -> None:
        self._freed.wait(timeout.total_seconds())
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_abort_frees_sender_and_caller_from_a_broadcast_that_gloo_has_forgotten(pair: list[WeightGroup]) -> None:
    mesh = pair[0]._link._mesh  # type: ignore[attr-defined]
    begun, freed = threading.Event(), threading.Event()
    whole, mesh.pg = mesh.pg, Forgotten(begun, freed)
    try:
        sending = WeightSender(MANIFEST).send(pair[0], PolicyVersion(0, 1), 60.0)
        assert begun.wait(5)
        before = time.monotonic()
        pair[0].abort()
        with pytest.raises(ServiceFault, match="bucket 0 of"):
            sending.result(5)
        assert time.monotonic() - before < 2
    finally:
        freed.set()
        del whole


def test_a_lost_sender_is_noticed_before_it_announces(pair: list[WeightGroup]) -> None:
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(0, 1), 60.0)
    pair[0].abort()
    with pytest.raises((ServiceFault, Cancelled)) as caught:
        reception.result(5)
    assert not isinstance(caught.value, ServiceFault) or caught.value.phase == "prepare"


def test_another_version_than_the_announced_is_refused(pair: list[WeightGroup]) -> None:
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(1, 2), 5.0)
    WeightSender(MANIFEST).send(pair[0], PolicyVersion(1, 1), 5.0)
    with pytest.raises(ServiceFault, match=r"verify: version 1\.2: bucket 0 of \d+ is of version 1\.1"):
        reception.result(5)


def test_a_staged_version_is_not_overwritten_before_its_release(pair: list[WeightGroup]) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    for version in range(2):
        reception = receiver.receive(pair[1], PolicyVersion(0, version), 5.0)
        fill(sender.views(5.0), version)
        sender.send(pair[0], PolicyVersion(0, version), 5.0)
        staged = reception.result(5)
        with pytest.raises(InvariantViolated, match=rf"0\.{version} is still staged"):
            receiver.receive(pair[1], PolicyVersion(0, 9), 5.0)
        assert same(staged.tensors(), version)
        staged.release()


def test_a_snapshot_waits_for_the_transfer_before(pair: list[WeightGroup]) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    fill(sender.views(1.0), 1)
    sent = sender.send(pair[0], PolicyVersion(0, 1), 5.0)
    with pytest.raises(DeadlineExceeded, match="sender: snapshot"):
        sender.views(0.1)
    reception = receiver.receive(pair[1], PolicyVersion(0, 1), 5.0)
    fill(sender.views(5.0), 2)
    assert same(reception.result(5).tensors(), 1)
    assert sent.result(5).seconds > 0.1


def test_many_aborts_leave_no_thread_and_no_file() -> None:
    aborts = Aborts()
    for _ in range(20):
        aborts.one()
    assert settles(threads_and_files, aborts.warm), f"{threads_and_files()} after {aborts.warm}"
