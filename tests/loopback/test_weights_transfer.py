"""Transfers of weights between threads: who waits for whom, deadlines, aborts, and versions kept apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup
from runtime.weights.receiver import Staged, WeightReceiver
from runtime.weights.sender import WeightSender
from tests.loopback.weight_aborts import Aborts, connected
from tests.loopback.weight_cases import IN_A_STORE, MANIFEST, PATIENCE, WAYS, gather, same, settles, threads_and_files


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[WeightGroup]]:
    groups = connected(request.param, folder=str(tmp_path))
    try:
        yield groups
    finally:
        for group in groups:
            group.abort()


@pytest.mark.parametrize("transport", WAYS)
def test_a_reception_waits_past_the_rendezvous_timeout_for_the_sender(transport: str, tmp_path: Path) -> None:
    timeout, groups = connected_in_little_time(transport, str(tmp_path))
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    reception = receiver.receive(groups[1], PolicyVersion(0, 1), PATIENCE)
    with pytest.raises(TimeoutError):
        wait(reception, timeout + 0.3)
    gather(sender, 1)
    sender.send(groups[0], PolicyVersion(0, 1), PATIENCE).result(PATIENCE)
    assert same(reception.result(PATIENCE).tensors(), 1)
    for group in groups:
        group.abort()


def connected_in_little_time(transport: str, folder: str) -> tuple[float, list[WeightGroup]]:
    """Members that have met, and the shortest timeout in which they did on this machine."""
    for timeout in (1.0, 4.0):
        with suppress(ServiceFault):
            return timeout, connected(transport, timeout=timeout, folder=folder)
    return 16.0, connected(transport, timeout=16.0, folder=folder)


def test_a_receptions_deadline_counts_from_the_announcement(pair: list[WeightGroup]) -> None:
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(0, 1), 0.3)
    with pytest.raises(TimeoutError):
        wait(reception, 0.6)
    pair[0].abort()
    with pytest.raises((ServiceFault, Cancelled)):
        reception.result(PATIENCE)


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
        reception.result(PATIENCE)
    assert caught.value.deadline == 0.3


@pytest.mark.parametrize("announced", [False, True], ids=["before", "during"])
def test_abort_frees_a_blocked_reception_at_once(pair: list[WeightGroup], announced: bool) -> None:
    receiver = WeightReceiver(MANIFEST)
    reception = receiver.receive(pair[1], PolicyVersion(0, 1), 10 * PATIENCE)
    if announced:
        pair[0].announce(PolicyVersion(0, 1))
    with pytest.raises(TimeoutError):
        wait(reception, 0.1)
    receiver.abort()
    with pytest.raises(Cancelled, match=r"version 0\.1 was withdrawn"):
        reception.result(PATIENCE)


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
        self._freed.wait()


class Endless:
    def __init__(self, freed: threading.Event) -> None:
        self._freed = freed

    def wait(self, timeout: timedelta) -> None:
        self._freed.wait(timeout.total_seconds())
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize(("leaves", "said"), [(0, "the group was aborted"), (1, "the connection to a member was lost")])
@pytest.mark.parametrize("pair", ["collective"], indirect=True)
def test_whoever_leaves_frees_the_sender_from_a_broadcast_that_gloo_has_forgotten(
    pair: list[WeightGroup], leaves: int, said: str
) -> None:
    mesh = pair[0]._links[0]._mesh  # type: ignore[attr-defined]
    begun, freed = threading.Event(), threading.Event()
    whole, mesh.pg = mesh.pg, Forgotten(begun, freed)
    try:
        sender = WeightSender(MANIFEST)
        gather(sender, 1)
        sending = sender.send(pair[0], PolicyVersion(0, 1), 10 * PATIENCE)
        assert begun.wait(PATIENCE)
        pair[leaves].abort()
        with pytest.raises(ServiceFault, match=f"bucket 0 of .*: {said}"):
            sending.result(PATIENCE)
    finally:
        freed.set()
        del whole


def test_a_lost_sender_is_noticed_before_it_announces(pair: list[WeightGroup]) -> None:
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(0, 1), 10 * PATIENCE)
    pair[0].abort()
    with pytest.raises((ServiceFault, Cancelled)) as caught:
        reception.result(PATIENCE)
    assert not isinstance(caught.value, ServiceFault) or caught.value.phase == "announce"


def test_another_version_than_the_announced_is_refused(pair: list[WeightGroup]) -> None:
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(1, 2), PATIENCE)
    sender = WeightSender(MANIFEST)
    gather(sender, 1)
    sender.send(pair[0], PolicyVersion(1, 1), PATIENCE)
    with pytest.raises(ServiceFault, match=r"verify: version 1\.2: bucket 0 of \d+ is of version 1\.1"):
        reception.result(PATIENCE)


def test_a_staged_version_is_not_overwritten_before_its_release(pair: list[WeightGroup]) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    for version in range(2):
        reception = receiver.receive(pair[1], PolicyVersion(0, version), PATIENCE)
        gather(sender, version)
        sender.send(pair[0], PolicyVersion(0, version), PATIENCE)
        staged = reception.result(PATIENCE)
        with pytest.raises(InvariantViolated, match=rf"0\.{version} is still staged"):
            receiver.receive(pair[1], PolicyVersion(0, 9), PATIENCE)
        assert same(staged.tensors(), version)
        staged.release()


def received(pair: list[WeightGroup], sender: WeightSender, receiver: WeightReceiver, version: int) -> Staged:
    reception = receiver.receive(pair[1], PolicyVersion(0, version), PATIENCE)
    gather(sender, version)
    sender.send(pair[0], PolicyVersion(0, version), PATIENCE)
    return reception.result(PATIENCE)


def test_an_adopted_version_stays_until_another_is_adopted(pair: list[WeightGroup]) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST, sets=2)
    first = received(pair, sender, receiver, 1)
    first.adopt()
    for version in (2, 3):  # as they are sent for others, or withdrawn
        forgotten = received(pair, sender, receiver, version)
        assert same(first.tensors(), 1)
        forgotten.release()
        forgotten.release()
    second = received(pair, sender, receiver, 4)
    assert same(first.tensors(), 1)
    second.adopt()
    first.release()  # it is not what is staged any more
    third = received(pair, sender, receiver, 5)
    assert same(second.tensors(), 4)
    assert third.tensors()["embed"].data_ptr() == first.tensors()["embed"].data_ptr()


def test_a_receiver_whose_sets_are_all_in_use_refuses(pair: list[WeightGroup]) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    received(pair, sender, receiver, 1).adopt()
    with pytest.raises(InvariantViolated, match=r"cannot receive 0\.2: every set of buckets is in use"):
        receiver.receive(pair[1], PolicyVersion(0, 2), PATIENCE)


@pytest.mark.parametrize("pair", IN_A_STORE, indirect=True)  # by way of a folder the sender waits for nobody
def test_a_snapshot_waits_for_the_transfer_before(pair: list[WeightGroup]) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    gather(sender, 1)
    sent = sender.send(pair[0], PolicyVersion(0, 1), PATIENCE)
    with pytest.raises(DeadlineExceeded, match="sender: snapshot"):
        sender.begin(0.1)
    reception = receiver.receive(pair[1], PolicyVersion(0, 1), PATIENCE)
    gather(sender, 2)
    assert same(reception.result(PATIENCE).tensors(), 1)
    assert sent.result(PATIENCE).nbytes > 0


@pytest.mark.parametrize("transport", WAYS)
def test_many_aborts_leave_no_thread_and_no_file(transport: str, tmp_path: Path) -> None:
    aborts = Aborts(transport, str(tmp_path))
    for _ in range(20):
        aborts.one()
    assert settles(threads_and_files, aborts.warm), f"{threads_and_files()} after {aborts.warm}"
    assert not list(tmp_path.iterdir())
