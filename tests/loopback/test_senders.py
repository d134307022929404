"""Several senders share a publication: what arrives is what one sender would bring, and whoever fails is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup
from runtime.weights.plan import Manifest, plan_buckets, roots
from runtime.weights.receiver import Staged, WeightReceiver
from runtime.weights.rendezvous import host, join
from runtime.weights.sender import SendResult, WeightSender, in_thread
from tests.loopback.ranks import Helper
from tests.loopback.weight_cases import MANIFEST, VERSION, connected, expected, same, settles, threads_and_files

NAMES = ("trainer-0", "trainer-1")
DEADLINE = 60.0  # seconds that something may take here
LATER = 600.0  # seconds of a transfer's deadline, for which no test waits


def held(*holders: tuple[int, ...]) -> Manifest:
    """The cases' tensors, held by `holders` in turn."""
    tensors = (
        msgspec.structs.replace(spec, held_by=holders[index % len(holders)]) for index, spec in enumerate(MANIFEST.tensors)
    )
    return Manifest(tuple(tensors), MANIFEST.bucket_bytes, len(NAMES))


SHARED, STAGES, ONE = held(()), held((0,), (1,)), held((1,))


@pytest.fixture(params=["collective+delta", "shared_memory"])
def groups(request: pytest.FixtureRequest) -> Iterator[list[WeightGroup]]:
    """Two senders, then two receivers."""
    made = connected(request.param, 4, senders=NAMES)
    try:
        yield made
    finally:
        for group in made:
            group.abort()


def share(manifest: Manifest, number: int, seed: int) -> list[torch.Tensor]:
    weights = list(expected(seed).values())
    return [weights[index] for index, root in enumerate(roots(manifest)) if root == number]


def send(
    groups: Sequence[WeightGroup], senders: Sequence[WeightSender], manifest: Manifest, step: int
) -> list[Future[SendResult]]:
    """Every sender fills its buckets and sends them."""
    sending = []
    for number, (group, sender) in enumerate(zip(groups, senders, strict=False)):
        sender.begin(DEADLINE)
        sending.append(sender.send(group, PolicyVersion(0, step), LATER))
        in_thread("fill", lambda sender=sender, number=number: sender.fill(share(manifest, number, step)))
    return sending


def post(groups: Sequence[WeightGroup], manifest: Manifest, deadline: float = LATER) -> list[Future[Staged]]:
    return [WeightReceiver(manifest).receive(group, VERSION, deadline) for group in groups]


def hears(group: WeightGroup) -> threading.Event:
    """Set once a receiver knows that its transfer has begun. All members being in one process, whoever leaves shuts down every
    connection to their store."""
    heard, listen = threading.Event(), group.await_announcement

    def listening(version: PolicyVersion) -> None:
        listen(version)
        heard.set()

    group.await_announcement = listening  # type: ignore[method-assign]
    return heard


def bits(staged: Staged) -> dict[str, bytes]:
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in staged.tensors().items()}


@pytest.mark.parametrize("manifest", [SHARED, STAGES], ids=["replicas", "stages"])
def test_two_senders_bring_what_one_brings(groups: list[WeightGroup], manifest: Manifest) -> None:
    senders = [WeightSender(manifest, number=number) for number in range(2)]
    receivers = [WeightReceiver(manifest) for _ in range(2)]
    for step in (1, 2):
        version = PolicyVersion(0, step)
        receptions = [receiver.receive(group, version, LATER) for group, receiver in zip(groups[2:], receivers, strict=True)]
        results = [sending.result(DEADLINE) for sending in send(groups, senders, manifest, step)]
        staged = [reception.result(DEADLINE) for reception in receptions]
        assert all(same(each.tensors(), step) for each in staged)
        assert results[0].nbytes >= sum(bucket.total_bytes for bucket in senders[0].buckets) > results[1].nbytes > 0
        alone = one_senders(step)
        assert [bits(each) for each in staged] == [alone, alone]
        for each in staged:
            each.release()


def one_senders(step: int) -> dict[str, bytes]:
    pair = connected("collective")
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(0, step), DEADLINE)
    sender = WeightSender(MANIFEST)
    sender.fill(expected(step).values())
    sender.send(pair[0], PolicyVersion(0, step), DEADLINE).result(DEADLINE)
    found = bits(reception.result(DEADLINE))
    for group in pair:
        group.abort()
    return found


def test_a_sender_without_a_share_keeps_nobody(groups: list[WeightGroup]) -> None:
    senders = [WeightSender(ONE, number=number) for number in range(2)]
    receptions = post(groups[2:], ONE)
    results = [sending.result(DEADLINE) for sending in send(groups, senders, ONE, 1)]
    assert all(same(reception.result(DEADLINE).tensors(), 1) for reception in receptions)
    assert results[0].nbytes == results[1].nbytes


def test_a_sender_that_leaves_is_named_by_the_receivers_and_by_rank_0(groups: list[WeightGroup]) -> None:
    senders = [WeightSender(SHARED, number=number) for number in range(2)]
    heard = [hears(group) for group in groups[2:]]
    receptions = post(groups[2:], SHARED)
    senders[0].fill(share(SHARED, 0, 1))
    senders[1].fill(share(SHARED, 1, 1)[:2])
    sending = [sender.send(group, VERSION, LATER) for sender, group in zip(senders, groups, strict=False)]
    assert all(each.wait(DEADLINE) for each in heard)
    senders[1].abort()
    for reception in receptions:
        with pytest.raises(ServiceFault, match=r"rollout-[23]: transfer: bucket \d+ of \d+ of version 0\.1 did not arrive"):
            reception.result(DEADLINE)
    with pytest.raises(ServiceFault, match="trainer: transfer: "):
        sending[0].result(DEADLINE)


def test_a_sender_that_is_late_is_named_at_the_deadline(groups: list[WeightGroup]) -> None:
    manifest = held((0,), (1,), (1,))
    senders = [WeightSender(manifest, number=number) for number in range(2)]
    receptions = post(groups[2:], manifest, 0.5)
    senders[0].fill(share(manifest, 0, 1))
    sending = senders[0].send(groups[0], VERSION, 0.7)
    for reception in receptions:
        with pytest.raises(DeadlineExceeded, match=r"rollout-[23]: transfer: bucket \d+ of \d+ .* from rank 1 \(trainer-1\): "):
            reception.result(DEADLINE)
    with pytest.raises(ServiceFault, match="trainer: transfer: "):
        sending.result(DEADLINE)


def test_rank_0_waits_for_the_parts_of_all_and_says_whose_was_not_taken(groups: list[WeightGroup]) -> None:
    sender = WeightSender(ONE, number=0)
    with pytest.raises(
        DeadlineExceeded, match=r"trainer: transfer: version 0\.1: the part of rank 1 \(trainer-1\) was not taken"
    ):
        sender.send(groups[0], VERSION, 0.3).result(DEADLINE)
    assert groups[0].aborted


def test_a_corrupted_bucket_of_either_is_told(groups: list[WeightGroup]) -> None:
    receptions, buckets = post(groups[2:], SHARED), plan_buckets(SHARED)

    def tampered(number: int) -> None:
        sender = WeightSender(SHARED, number=number)
        sender.fill(share(SHARED, number, 1))
        groups[number].announce(VERSION)
        for (index, bucket), buffer in zip(sender._own, sender._buffers, strict=True):
            groups[number].tags.stamp(index, bucket, buffer, VERSION)
            buffer[0] ^= number
            groups[number].send(index, buffer).wait(DEADLINE)

    for sending in [in_thread("send", lambda number=number: tampered(number)) for number in range(2)]:
        sending.result(DEADLINE)
    bad = [index for index, bucket in enumerate(buckets) if bucket.root == 1]
    for reception in receptions:
        with pytest.raises(ServiceFault, match="verify") as caught:
            reception.result(DEADLINE)
        assert [index for index in range(len(buckets)) if f"bucket {index} of" in str(caught.value)] == bad


def test_a_sender_that_does_not_come_is_named() -> None:
    pending = host(1, 3, "127.0.0.1", "gloo", 2.0, "trainer-0", "collective", names=NAMES, senders=len(NAMES))
    joining = in_thread("join", lambda: join(msgspec.structs.replace(pending.address, rank=2), "rollout-0"))
    with pytest.raises(ServiceFault, match=r"trainer-0: rendezvous: rank 1 \(trainer-1\)(, rank 2)? did not join"):
        pending.connect()
    with pytest.raises(ServiceFault, match="rollout-0: rendezvous: "):  # it may see no more than that rank 0 leaves
        joining.result(DEADLINE)


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_groups_that_are_left_leave_nothing(transport: str) -> None:
    def one() -> None:
        for group in connected(transport, 4, senders=NAMES):
            group.abort()

    for _ in range(2):
        one()
    threads, files = threads_and_files()
    for _ in range(5):
        one()
    assert settles(threads_and_files, [threads + 2, files + 6])


def member(connection: Any) -> None:
    """Sender 1, which never gets further than a part of its share."""
    address, manifest, deadline = connection.recv()
    sender = WeightSender(manifest, number=1)
    sender.fill(share(manifest, 1, 1)[:-1])
    sending = sender.send(join(address, NAMES[1]), VERSION, deadline)
    connection.send("sending")
    sending.exception()
    connection.recv()  # until its test has ended


@contextmanager
def apart(transport: str, manifest: Manifest, deadline: float) -> Iterator[tuple[list[WeightGroup], Helper]]:
    """The other members, and sender 1, which is a process and sends."""
    pending = host(1, 4, "127.0.0.1", "gloo", DEADLINE, "trainer-0", transport, names=NAMES, senders=len(NAMES))
    helper = Helper(member)
    try:
        helper.tell(msgspec.structs.replace(pending.address, rank=1), manifest, deadline)
        others = [
            in_thread("join", lambda rank=rank: join(msgspec.structs.replace(pending.address, rank=rank), f"rollout-{rank}"))
            for rank in (2, 3)
        ]
        groups = [pending.connect(), *(other.result(DEADLINE) for other in others)]
        assert helper.hear() == "sending"
        yield groups, helper
        for group in groups:
            group.abort()
    finally:
        helper.end()


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_a_sender_that_is_killed_within_a_transfer_is_named_at_once(transport: str) -> None:
    with apart(transport, SHARED, LATER) as (groups, helper):
        heard = [hears(group) for group in groups[1:]]
        receptions = post(groups[1:], SHARED)
        sender = WeightSender(SHARED, number=0)
        sender.fill(share(SHARED, 0, 1))
        sending = sender.send(groups[0], VERSION, LATER)
        assert all(each.wait(DEADLINE) for each in heard)
        helper.process.kill()
        said = [str(reception.exception(DEADLINE)) for reception in receptions]
        assert all(": transfer: bucket " in each for each in said)  # at once: not at the transfer's deadline
        # Whoever sees it first gives up, and rank 0 then does: what a slower receiver sees first may be that.
        assert any("from rank 1 (trainer-1): " in each for each in said), said
        with pytest.raises(ServiceFault, match="trainer-0: transfer: "):  # nobody takes its part any more
            sending.result(DEADLINE)


def test_what_a_sender_says_of_its_failure_reaches_rank_0() -> None:
    with apart("collective", ONE, 0.3) as (groups, _):
        said = r"trainer-0: transfer: version 0\.1: rank 1 \(trainer-1\): bucket \d+ of \d+ .* was not taken"
        with pytest.raises(ServiceFault, match=said):
            WeightSender(ONE, number=0).send(groups[0], VERSION, DEADLINE).result(DEADLINE)
