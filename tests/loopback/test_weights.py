"""Transfers of weights by each transport: to processes, between threads, and from two senders, each of a part."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch

from runtime.commands import CommitWeights, ReceiveWeights, WeightsSent
from runtime.config import Config, Run
from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault
from runtime.process.waiting import in_thread
from runtime.types import PolicyVersion
from runtime.weights.group import TAG, BucketTags, Shard, indexed
from runtime.weights.plan import Cut, Manifest, Sharding, parts, plan_buckets
from runtime.weights.receiver import StagedWeights, WeightReceiver
from runtime.weights.sender import SendBuffers, WeightGroup, join_rendezvous, open_rendezvous
from tests.loopback.ranks import Helper
from tests.loopback.test_epochs import BufferedBytes
from tests.loopback.weight_cases import (
    MANIFEST,
    PATIENCE,
    SOME_WAYS,
    VERSION,
    WAYS,
    Aborts,
    Member,
    connect,
    connected,
    expected,
    gather,
    leave,
    machines_of,
    on_a_loop,
    post,
    posted,
    same,
    settles,
    soon,
    threads_and_files,
    unhosted,
)

TWO_WAYS = ("collective", "shared_memory+delta")
NAMES = ("trainer-0", "trainer-1")  # of two senders


def started() -> list[Member]:
    torch.set_num_threads(1)
    return [Member(f"rollout-{index}") for index in range(2)]


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    """Two receivers, which every test leaves as they were."""
    made = started()
    try:
        yield made
    finally:
        for one in made:
            one.end()


@pytest.fixture(params=SOME_WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[list[WeightGroup]]:
    groups = connected(request.param)
    try:
        yield groups
    finally:
        for group in groups:
            group.abort()


def send(group: WeightGroup, sender: SendBuffers, step: int, deadline: float = PATIENCE) -> Future[WeightsSent]:
    gather(sender, step)
    return sender.send(group, PolicyVersion(0, step), deadline)


@pytest.mark.parametrize("transport", WAYS)
def test_two_processes_receive_every_version_whole(members: list[Member], transport: str) -> None:
    group = connect(members, 1, transport=transport)
    sender = SendBuffers(MANIFEST, takes_changes=transport.endswith("delta"))
    assert sender.count > 3
    for version in range(4):
        post(members, version, PATIENCE)
        result = send(group, sender, version).result(PATIENCE)
        whole = sum(bucket.nbytes + TAG.size for _, bucket in sender.own)
        assert result.bytes == whole if not transport.endswith("delta") else 0 < result.bytes < 1.1 * whole
        assert [one.hear() for one in members] == [("staged", version, True)] * 2
    leave(members, group)


@pytest.mark.parametrize("transport", SOME_WAYS)
def test_a_corrupted_bucket_is_named(members: list[Member], transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = connect(members, 2, transport=transport)
    sender = SendBuffers(MANIFEST)
    tag = BucketTags.tag

    def tag_then_flip(tags: BucketTags, index: int, digest: int, version: PolicyVersion) -> bytes:
        if index == 2:
            sender.buffers[index][5] ^= 1
        return tag(tags, index, digest, version)

    with monkeypatch.context() as patch:
        patch.setattr(BucketTags, "tag", tag_then_flip)
        post(members, 1, PATIENCE)
        send(group, sender, 1).result(PATIENCE)
    for one in members:
        kind, phase, text = one.hear()
        assert (kind, phase) == ("fault", "verify")
        assert one.name in text and f"bucket 2 of {sender.count} (" in text and "): the checksum" in text
        assert "bucket 1 of" not in text
    post(members, 2, PATIENCE)  # the group is whole
    send(group, sender, 2).result(PATIENCE)
    assert [one.hear() for one in members] == [("staged", 2, True)] * 2
    leave(members, group)


@pytest.mark.parametrize("transport", TWO_WAYS)
def test_a_stopped_receiver_ends_everyone_in_time_and_leaves_nothing(members: list[Member], transport: str) -> None:
    def counts() -> list[int]:
        for one in members:
            one.tell("counts")
        return [*threads_and_files(), *members[0].hear()[1], *members[1].hear()[1]]

    sender = SendBuffers(MANIFEST)
    leave(members, connect(members, 2, transport=transport))  # the first group of a process opens what the next ones use
    before = counts()
    group = connect(members, 3, transport=transport)
    post(members, 1, 2 * PATIENCE)
    stopped, innocent = members
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        whom = r": timed out waiting for rank 1 \(rollout-0\)" if "shared_memory" in transport else ""
        with pytest.raises(
            DeadlineExceeded, match=r"trainer: transfer: bucket 0 of \d+ \(.*\) of version 0\.1 was not taken" + whom
        ):
            send(group, sender, 1, 0.5).result(PATIENCE)
        kind, phase, text = innocent.hear()  # long before its own deadline
        assert (kind, phase) == ("fault", "transfer"), text
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.hear()[0] == "fault"
    del group
    for one in members:
        one.tell("leave")
        assert one.hear()[0] == "left"
    assert settles(counts, before)

    group = connect(members, 4, transport=transport)  # a new epoch goes on with the same buffers
    post(members, 5, PATIENCE)
    send(group, sender, 5).result(PATIENCE)
    assert [one.hear() for one in members] == [("staged", 5, True)] * 2
    leave(members, group)


# ------------------------------------------------------------------------------------------------ between threads
@pytest.mark.parametrize("transport", SOME_WAYS)
def test_a_reception_waits_past_the_rendezvous_timeout_for_the_sender(transport: str) -> None:
    timeout, groups = connected_in_little_time(transport)
    sender, receiver = SendBuffers(MANIFEST), StagedWeights(MANIFEST)
    reception = posted(receiver, groups[1], VERSION, PATIENCE)
    with pytest.raises(TimeoutError):
        wait(reception, timeout + 0.3)
    send(groups[0], sender, 1).result(PATIENCE)
    assert same(reception.result(PATIENCE).tensors(), 1)
    for group in groups:
        group.abort()


def connected_in_little_time(transport: str) -> tuple[float, list[WeightGroup]]:
    """Members that have met, and the shortest timeout in which they did on this machine."""
    for timeout in (0.5, 4.0):
        with suppress(ServiceFault):
            return timeout, connected(transport, timeout=timeout)
    return 16.0, connected(transport, timeout=16.0)


def wait(future: Future[Any], seconds: float) -> Any:
    """`future.result`, with the one TimeoutError of all supported Pythons."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(seconds):
        raise TimeoutError
    return future.result()


def test_a_receptions_deadline_counts_from_the_announcement_and_ends_what_stalls(pair: list[WeightGroup]) -> None:
    reception = posted(StagedWeights(MANIFEST), pair[1], VERSION, 0.2)
    with pytest.raises(TimeoutError):
        wait(reception, 0.5)
    pair[0].announce(VERSION)
    with pytest.raises(DeadlineExceeded, match="rollout-1: transfer: bucket 0 of") as caught:
        reception.result(PATIENCE)
    assert caught.value.deadline == 0.2


@pytest.mark.parametrize("announced", [False, True], ids=["before", "during"])
def test_abort_frees_a_blocked_reception_at_once(pair: list[WeightGroup], announced: bool) -> None:
    reception = posted(StagedWeights(MANIFEST), pair[1], VERSION, 10 * PATIENCE)
    if announced:
        pair[0].announce(VERSION)
    with pytest.raises(TimeoutError):
        wait(reception, 0.1)
    pair[1].abort()
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
def test_who_leaves_frees_the_sender_of_a_broadcast_that_gloo_forgot(pair: list[WeightGroup], leaves: int, said: str) -> None:
    mesh = pair[0]._links[0]  # type: ignore[attr-defined]
    begun, freed = threading.Event(), threading.Event()
    whole, mesh.gloo = mesh.gloo, Forgotten(begun, freed)
    try:
        sending = send(pair[0], SendBuffers(MANIFEST), 1, 10 * PATIENCE)
        assert begun.wait(PATIENCE)
        pair[leaves].abort()
        with pytest.raises(ServiceFault, match=f"bucket 0 of .*: {said}"):
            sending.result(PATIENCE)
    finally:
        freed.set()
        del whole


def test_a_lost_sender_is_noticed_before_it_announces(pair: list[WeightGroup]) -> None:
    reception = posted(StagedWeights(MANIFEST), pair[1], VERSION, 10 * PATIENCE)
    pair[0].abort()
    with pytest.raises((ServiceFault, Cancelled)) as caught:
        reception.result(PATIENCE)
    assert not isinstance(caught.value, ServiceFault) or caught.value.phase == "announce"


def test_another_version_than_the_announced_is_refused(pair: list[WeightGroup]) -> None:
    reception = posted(StagedWeights(MANIFEST), pair[1], PolicyVersion(1, 2), PATIENCE)
    sender = SendBuffers(MANIFEST)
    gather(sender, 1)
    sender.send(pair[0], PolicyVersion(1, 1), PATIENCE)
    with pytest.raises(ServiceFault, match=r"verify: version 1\.2: bucket 0 of \d+ \(.*\) is of version 1\.1"):
        reception.result(PATIENCE)


def received(pair: list[WeightGroup], sender: SendBuffers, receiver: StagedWeights, version: int) -> StagedWeights:
    reception = posted(receiver, pair[1], PolicyVersion(0, version), PATIENCE)
    send(pair[0], sender, version)
    return reception.result(PATIENCE)


def test_a_staged_version_is_not_overwritten_before_its_release(pair: list[WeightGroup]) -> None:
    sender, receiver = SendBuffers(MANIFEST), StagedWeights(MANIFEST)
    for version in range(2):
        staged = received(pair, sender, receiver, version)
        with pytest.raises(InvariantViolated, match=rf"0\.{version} is still staged"):
            posted(receiver, pair[1], PolicyVersion(0, 9), PATIENCE).result(PATIENCE)
        assert same(staged.tensors(), version)
        staged.release()


@pytest.mark.parametrize("pair", TWO_WAYS, indirect=True)
@on_a_loop
async def test_an_adopted_version_stays_until_another_is_adopted(pair: list[WeightGroup]) -> None:
    sender, engine = SendBuffers(MANIFEST), BufferedBytes()
    receiver = WeightReceiver(engine, Config(run=Run(name="test")), "rollout-1")  # type: ignore[arg-type]
    receiver.epoch, receiver.groups = 1, [pair[1]]
    receiver._prepare(MANIFEST)

    async def receive(step: int) -> CommitWeights:
        version = PolicyVersion(0, step)
        receiving = asyncio.ensure_future(receiver.receive(ReceiveWeights(version, 1)))
        await asyncio.sleep(0)
        send(pair[0], sender, step)
        await receiving
        return CommitWeights(version, 1)

    assert receiver.needs_swap(await receive(1)) and receiver.held is None
    await receiver.swap()
    first = receiver.held
    for _ in range(2):  # as it is sent for others
        assert not receiver.needs_swap(await receive(1))
        assert first is receiver.held is receiver._adopted and same(first.tensors(), 1)
    second = await receive(4)
    with pytest.raises(InvariantViolated, match=r"cannot receive 0\.5: 0\.4 is still staged"):
        await receiver.receive(ReceiveWeights(PolicyVersion(0, 5), 1))
    assert same(first.tensors(), 1)
    assert receiver.needs_swap(second)
    await receiver.swap()
    assert receiver.held is not first
    third = await receive(5)
    assert receiver.held is not None and same(receiver.held.tensors(), 4)
    assert receiver.needs_swap(third)
    await receiver.swap()
    assert receiver.held is first and engine.swapped == [1, 4, 5]


@pytest.mark.parametrize("pair", TWO_WAYS, indirect=True)  # by way of a folder the sender waits for nobody
def test_a_snapshot_waits_for_the_transfer_before(pair: list[WeightGroup]) -> None:
    sender, receiver = SendBuffers(MANIFEST), StagedWeights(MANIFEST)
    sent = send(pair[0], sender, 1)
    with pytest.raises(DeadlineExceeded, match="sender: snapshot"):
        sender.begin(VERSION, 0.1)
    reception = posted(receiver, pair[1], VERSION, PATIENCE)
    gather(sender, 2)
    assert same(reception.result(PATIENCE).tensors(), 1)
    assert sent.result(PATIENCE).bytes > 0


@pytest.mark.parametrize(
    ("transport", "senders"), [*((way, ()) for way in SOME_WAYS), ("collective", NAMES), ("shared_memory+delta", NAMES)]
)
def test_many_aborts_leave_no_thread_and_no_file(transport: str, senders: tuple[str, ...]) -> None:
    aborts = Aborts(transport, senders)
    for _ in range(10):
        aborts.one()
    more = (2, 6) if senders else (0, 0)  # what ten leave would be more
    most = [count + slack for count, slack in zip(aborts.warm, more, strict=True)]
    assert settles(threads_and_files, most), f"{threads_and_files()} after {aborts.warm}"


# ------------------------------------------------------------------------------------------------ two senders
LATER = 600.0  # seconds of a transfer's deadline, for which no test waits


def held(*holders: tuple[int, ...]) -> Manifest:
    """The cases' tensors, held by `holders` in turn."""
    cuts = [Cut((holders[index % len(holders)],)) for index in range(len(MANIFEST.tensors))]
    return Manifest(MANIFEST.tensors, MANIFEST.bucket_bytes, Sharding.of(len(NAMES), cuts))


def halves() -> Manifest:
    """The cases' tensors, of whose matrices each sender holds a part: of one by rows, of the next by columns."""
    cuts = [Cut(((0, 1),))]
    for index, spec in enumerate(MANIFEST.tensors):
        if len(spec.shape) == 2:
            cuts.append(Cut(((0,), (1,)), index % 2, spec.shape[index % 2] // 2 + 1))
    of_matrices = iter(range(1, len(cuts)))
    cut_of = tuple(next(of_matrices) if len(spec.shape) == 2 else 0 for spec in MANIFEST.tensors)
    return Manifest(MANIFEST.tensors, MANIFEST.bucket_bytes, Sharding(len(NAMES), tuple(cuts), cut_of))


SHARED, STAGES, ONE = held((0, 1)), held((0,), (1,)), held((1,))


@pytest.fixture(params=["collective+delta", "shared_memory", "relay", "relay+delta"])
def groups(request: pytest.FixtureRequest) -> Iterator[list[WeightGroup]]:
    """Two senders, then two receivers."""
    made = connected(request.param, 4, senders=NAMES)
    try:
        yield made
    finally:
        for group in made:
            group.abort()


def share(manifest: Manifest, number: int, seed: int) -> list[Shard]:
    return [
        Shard(index, span, indexed(whole, span))
        for index, whole in enumerate(expected(seed).values())
        for span, holders in parts(manifest.tensors[index], manifest.source.cut(index))
        if number in holders
    ]


def send_all(
    groups: Sequence[WeightGroup], senders: Sequence[SendBuffers], manifest: Manifest, step: int
) -> list[Future[WeightsSent]]:
    """Every sender fills its buckets and sends them."""
    sending = []
    for number, (group, sender) in enumerate(zip(groups, senders, strict=False)):
        sender.begin(PolicyVersion(0, step), PATIENCE)
        sending.append(sender.send(group, PolicyVersion(0, step), LATER))
        in_thread("fill", lambda sender=sender, number=number: sender.fill(share(manifest, number, step)))
    return sending


def post_all(groups: Sequence[WeightGroup], manifest: Manifest, deadline: float = LATER) -> list[Future[StagedWeights]]:
    return [posted(StagedWeights(manifest), group, VERSION, deadline) for group in groups]


def hears(group: WeightGroup) -> threading.Event:
    """Set once a receiver knows that its transfer has begun. All members being in one process, whoever leaves shuts down every
    connection to their store."""
    heard, listen = threading.Event(), group.await_announcement

    def listening(version: PolicyVersion) -> None:
        listen(version)
        heard.set()

    group.await_announcement = listening  # type: ignore[method-assign]
    return heard


@pytest.mark.parametrize("manifest", [SHARED, STAGES, ONE, halves()], ids=["replicas", "stages", "all of one", "halves"])
def test_two_senders_bring_what_one_brings(groups: list[WeightGroup], manifest: Manifest) -> None:
    senders = [SendBuffers(manifest, number=number) for number in range(2)]
    receivers = [StagedWeights(manifest) for _ in range(2)]
    for step in (1, 2):
        version = PolicyVersion(0, step)
        receptions = [posted(receiver, group, version, LATER) for group, receiver in zip(groups[2:], receivers, strict=True)]
        results = [sending.result(PATIENCE) for sending in send_all(groups, senders, manifest, step)]
        staged = [reception.result(PATIENCE) for reception in receptions]
        assert all(same(each.tensors(), step) for each in staged)
        if manifest is ONE:
            assert results[0].bytes == results[1].bytes  # what it tells is what all sent
        else:
            own = [sum(bucket.nbytes for _, bucket in sender.own) for sender in senders]
            assert min(own) > 0 and results[0].bytes >= sum(own) > results[1].bytes >= own[1]
        for each in staged:
            each.release()


def test_a_sender_that_is_late_is_named_at_the_deadline(groups: list[WeightGroup]) -> None:
    manifest = held((0,), (1,), (1,))
    senders = [SendBuffers(manifest, number=number) for number in range(2)]
    receptions = post_all(groups[2:], manifest, 0.5)
    senders[0].fill(share(manifest, 0, 1))
    sending = senders[0].send(groups[0], VERSION, 0.7)
    for reception in receptions:
        with pytest.raises(DeadlineExceeded, match=r"rollout-[23]: transfer: bucket \d+ of \d+ .* from rank 1 \(trainer-1\): "):
            reception.result(PATIENCE)
    with pytest.raises(ServiceFault, match="trainer: transfer: "):
        sending.result(PATIENCE)


def test_rank_0_waits_for_the_parts_of_all_and_says_whose_was_not_taken(groups: list[WeightGroup]) -> None:
    sender = SendBuffers(ONE, number=0)
    with pytest.raises(
        DeadlineExceeded, match=r"trainer: transfer: version 0\.1: the part of rank 1 \(trainer-1\) was not taken"
    ):
        sender.send(groups[0], VERSION, 0.3).result(PATIENCE)
    assert groups[0].aborted


def test_a_corrupted_bucket_of_either_is_told(groups: list[WeightGroup]) -> None:
    receptions, buckets = post_all(groups[2:], SHARED), plan_buckets(SHARED)

    def tampered(number: int) -> None:
        sender = SendBuffers(SHARED, number=number)
        sender.fill(share(SHARED, number, 1))
        groups[number].announce(VERSION)
        tags, link = list[bytes](), groups[number].way(number, 0)
        for (index, _), buffer in zip(sender.own, sender.buffers, strict=True):
            tags.append(groups[number].tags.tag(index, groups[number].tags.digest(buffer), VERSION))
            link.describe(tags[-1], None)
            buffer[0] ^= number
            link.send(index, buffer)(soon())
        last = torch.frombuffer(bytearray(b"".join(tags)), dtype=torch.uint8)
        link.describe(tags[-1], None)
        link.send(sender.count + number, last)(soon())

    for sending in [in_thread("send", lambda number=number: tampered(number)) for number in range(2)]:
        sending.result(PATIENCE)
    bad = [index for index, bucket in enumerate(buckets) if bucket.root == 1]
    for reception in receptions:
        with pytest.raises(ServiceFault, match="verify") as caught:
            reception.result(PATIENCE)
        assert [index for index in range(len(buckets)) if f"bucket {index} of" in str(caught.value)] == bad


def member(connection: Any) -> None:
    """Sender 1, which never gets further than a part of its share."""
    address, manifest, deadline = connection.recv()
    sender = SendBuffers(manifest, number=1)
    with suppress(InvariantViolated):
        sender.fill(share(manifest, 1, 1)[:7])
    sending = sender.send(join_rendezvous(address, NAMES[1]), VERSION, deadline)
    connection.send("sending")
    sending.exception()
    connection.recv()  # until its test has ended


@contextmanager
def apart(transport: str, manifest: Manifest, deadline: float) -> Iterator[tuple[list[WeightGroup], Helper]]:
    """The other members, and sender 1, which is a process and sends."""
    told = {"machines": machines_of(transport, len(NAMES), 4), "names": NAMES, "senders": len(NAMES)}
    pending = open_rendezvous(unhosted(4, **told), "127.0.0.1", name="trainer-0")
    helper = Helper(member)
    try:
        helper.tell(msgspec.structs.replace(pending.address, rank=1), manifest, deadline)
        others = [
            in_thread(
                "join",
                lambda rank=rank: join_rendezvous(msgspec.structs.replace(pending.address, rank=rank), f"rollout-{rank}"),
            )
            for rank in (2, 3)
        ]
        groups = [pending.connect(), *(other.result(PATIENCE) for other in others)]
        assert helper.hear() == "sending"
        yield groups, helper
        for group in groups:
            group.abort()
    finally:
        helper.end()


@pytest.mark.parametrize("transport", ["collective", "shared_memory", "relay"])
def test_a_sender_that_is_killed_within_a_transfer_is_named_at_once(transport: str) -> None:
    with apart(transport, SHARED, LATER) as (groups, helper):
        heard = [hears(group) for group in groups[1:]]
        receptions = post_all(groups[1:], SHARED)
        sender = SendBuffers(SHARED, number=0)
        sender.fill(share(SHARED, 0, 1))
        sending = sender.send(groups[0], VERSION, LATER)
        assert all(each.wait(PATIENCE) for each in heard)
        helper.process.kill()
        said = [str(reception.exception(PATIENCE)) for reception in receptions]
        assert all(": transfer: bucket " in each for each in said)  # at once: not at the transfer's deadline
        # Whoever sees it first gives up, and rank 0 then does: what a slower receiver sees first may be that.
        assert any("from rank 1 (trainer-1): " in each for each in said), said
        with pytest.raises(ServiceFault, match="trainer-0: transfer: "):  # nobody takes its part any more
            sending.result(PATIENCE)


def test_what_a_sender_says_of_its_failure_reaches_rank_0() -> None:
    with apart("collective", ONE, 0.3) as (groups, _):
        said = r"trainer-0: transfer: version 0\.1: rank 1 \(trainer-1\): bucket \d+ of \d+ .* was not taken"
        with pytest.raises(ServiceFault, match=said):
            SendBuffers(ONE, number=0).send(groups[0], VERSION, PATIENCE).result(PATIENCE)
