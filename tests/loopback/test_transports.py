"""Shared memory where processes die, lie, or are strangers; a shared folder; how members meet; what a stranger can do."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from runtime.errors import ServiceFault, UserError
from runtime.process.waiting import in_thread
from runtime.types import PolicyVersion
from runtime.weights import shared_memory
from runtime.weights.group import (
    AuthenticatedStore,
    BucketTags,
    ForgedValue,
    Link,
    Target,
    arena,
    file_of,
    memory_file,
    new_key,
)
from runtime.weights.plan import GroupAddress
from runtime.weights.receiver import StagedWeights
from runtime.weights.sender import SendBuffers, WeightGroup, join_rendezvous, open_rendezvous
from tests.loopback.weight_cases import (
    MANIFEST,
    PATIENCE,
    ROOT,
    VERSION,
    gather,
    machines_of,
    mappings,
    posted,
    same,
    settles,
    soon,
    threads_and_files,
    transport_and_encoding,
    unhosted,
)

LABELS = ("trainer", "rollout-0", "rollout-1")
KEY = bytes(32)
ADDRESS: dict[str, Any] = {"epoch": 1, "host": "", "port": 0, "rank": 0, "world_size": 2, "timeout": PATIENCE}


def meeting(world_size: int = 2, timeout: float = PATIENCE) -> list[Future[Link]]:
    """The members of a group, that meet in a store of this process."""
    torch.set_num_threads(1)
    store = AuthenticatedStore(dist.HashStore(), KEY)
    told = ADDRESS | {"port": 1, "world_size": world_size, "timeout": timeout, "backend": "gloo", "key": KEY}
    address = GroupAddress(**told)
    return [
        in_thread(
            "connect",
            lambda rank=rank: shared_memory.connect(
                store, msgspec.structs.replace(address, rank=rank), LABELS[:world_size], LABELS[rank], ""
            ),
        )
        for rank in range(world_size)
    ]


def links(world_size: int = 2, timeout: float = PATIENCE) -> list[Link]:
    return [member.result(PATIENCE) for member in meeting(world_size, timeout)]


@pytest.fixture
def pair() -> Iterator[list[Link]]:
    made = links()
    try:
        yield made
    finally:
        for link in made:
            link.abort()


# ------------------------------------------------------------------------------------------------ what moves
@pytest.mark.parametrize("shared", [True, False], ids=["files", "a rollout's own memory"])
def test_buckets_of_any_size_arrive(pair: list[Link], shared: bool) -> None:
    sizes, before = (1, 63, (1 << 20) - 1, 1 << 20, (3 << 20) + 5), mappings()
    for seed in range(2):  # a sender's buckets may be made anew while the group stays
        sources = arena(sizes) if shared else [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for buffer in sources:
            buffer.copy_(torch.randint(0, 256, buffer.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
        sent = [pair[0].send(index, buffer) for index, buffer in enumerate(sources)]
        for index, buffer in enumerate(sources):
            arrived = torch.zeros_like(buffer)
            pair[1].receive(index, Target.of(arrived))(soon())
            assert torch.equal(arrived, buffer)
        for transfer in sent:
            transfer(soon())
        del sources, buffer
    assert not shared or 0 < len(mappings() - before) <= shared_memory.FILES  # the receiver's


def test_another_bucket_than_the_one_awaited_is_refused(pair: list[Link]) -> None:
    pair[0].send(3, memory_file(64))
    with pytest.raises(RuntimeError, match="trainer sent bucket 3, 64 bytes at 0, for bucket 0, 32 bytes"):
        pair[1].receive(0, Target.of(torch.zeros(32, dtype=torch.uint8)))(soon())


def test_nothing_is_read_beyond_the_memory_file(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "file_of", lambda buffer: (file_of(buffer)[0], 1 << 20))
    pair[0].send(0, memory_file(64))
    with pytest.raises(RuntimeError, match="trainer sent bucket 0, 64 bytes at 1048576, "):
        pair[1].receive(0, Target.of(torch.zeros(64, dtype=torch.uint8)))(soon())


def test_the_checksum_is_of_what_the_receiver_has(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    copyto = np.copyto

    def faulty(target: Any, source: Any) -> None:
        copyto(target, source)
        target[-1] ^= 1

    bucket = memory_file((3 << 20) + 5)
    bucket.copy_(torch.arange(bucket.numel()) % 251)
    arrived = torch.zeros_like(bucket)
    pair[0].send(0, bucket)
    assert pair[1].receive(0, Target.of(arrived))(soon()).digest == digest_of(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", faulty)
        pair[0].send(1, bucket)
        digest = pair[1].receive(1, Target.of(arrived))(soon()).digest
    assert not torch.equal(arrived, bucket)
    assert digest == digest_of(arrived)


def digest_of(buffer: torch.Tensor) -> int:
    return BucketTags(KEY).digest(buffer)


class BufferedBytes:
    """Holds every copy of `nbytes` until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, nbytes: int):
        self.begun, self.go = threading.Event(), threading.Event()
        copy_and_hash = shared_memory.copy_and_hash

        def hold(source: Any, parts: Any, hasher: Any, check: Any) -> Any:
            if len(source) == nbytes:
                self.begun.set()
                assert self.go.wait(PATIENCE)
            return copy_and_hash(source, parts, hasher, check)

        patch.setattr(shared_memory, "copy_and_hash", hold)


def test_a_bucket_counts_as_taken_after_those_before_it(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LANES", 2)
    held = BufferedBytes(monkeypatch, 64)
    sources = arena((64, 128))
    sent = [pair[0].send(index, buffer) for index, buffer in enumerate(sources)]
    copies = [pair[1].receive(index, Target.of(torch.empty_like(buffer))) for index, buffer in enumerate(sources)]
    second = copies[1].args[0].result(PATIENCE).digest  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="timed out waiting for rollout-0"):
        sent[0](soon(0.1))
    held.go.set()
    copies[0](soon())
    sent[0](soon())
    assert copies[1](soon()).digest == second
    sent[1](soon())


def test_an_aborted_group_writes_into_no_buffer_any_more(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    held, (buffer,) = BufferedBytes(monkeypatch, 64), arena((64,))
    buffer.fill_(1)
    arrived = torch.zeros_like(buffer)
    pair[0].send(0, buffer)
    copy = pair[1].receive(0, Target.of(arrived))
    assert held.begun.wait(PATIENCE)
    ended = in_thread("abort", pair[1].abort)
    with pytest.raises(RuntimeError, match=r"the group was aborted|timed out waiting"):
        copy(soon(0.1))
    assert not ended.done()
    held.go.set()
    ended.result(PATIENCE)
    assert not arrived.any()
    with pytest.raises(RuntimeError, match="the group was aborted"):
        pair[1].receive(1, Target.of(arrived))


# ------------------------------------------------------------------------------------------------ processes that fail
def test_who_ends_is_named_whoever_is_waited_for() -> None:
    trainer, *others = links(3)
    buffer = memory_file(64)
    transfer = trainer.send(0, buffer)
    others[0].receive(0, Target.of(torch.zeros_like(buffer)))(soon())
    others[0].abort()
    with pytest.raises(RuntimeError, match="rollout-0 is gone"):
        transfer(soon())
    trainer.abort()
    with pytest.raises(RuntimeError, match="trainer is gone"):
        others[1].receive(0, Target.of(torch.zeros_like(buffer)))(soon())
    others[1].abort()


def test_many_aborts_leave_no_thread_no_file_and_no_mapping() -> None:
    buffer = memory_file(8 << 20)

    def one_epoch(posted: bool) -> None:
        trainer, *others = links(3)
        waits = [other.receive(0, Target.of(torch.empty_like(buffer))) for other in others]
        waits += [trainer.send(0, buffer)] if posted else []
        blocked = [in_thread("blocked", lambda wait=wait: wait(soon(60.0))) for wait in waits]
        for link in (trainer, *others):
            link.abort()
        for each in blocked:
            try:
                each.result(PATIENCE)
            except RuntimeError as error:
                assert "aborted" in str(error) or "is gone" in str(error)

    one_epoch(True)
    before, mapped = threads_and_files(), mappings()
    for index in range(50):
        one_epoch(bool(index % 2))
    assert settles(lambda: [*threads_and_files(), len(mappings() - mapped)], [*before, 0])


# ------------------------------------------------------------------------------------------------ strangers
def test_another_users_process_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(shared_memory, "user_of", lambda peer: own + 1)
    trainer, rollout = meeting(timeout=0.5)
    with pytest.raises(ServiceFault, match=rf"rollout-0: rendezvous: trainer is of user {own + 1}, this process of {own}"):
        rollout.result(PATIENCE)
    with pytest.raises(ServiceFault, match="trainer: rendezvous: rollout-0 did not join"):
        trainer.result(PATIENCE)


def test_the_sender_lets_in_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.local()
    user_of = shared_memory.user_of

    def stranger_to_the_sender(peer: socket.socket) -> int:
        first, asked.once = not getattr(asked, "once", False), True
        return user_of(peer) + (peer.getsockname() != "" and first)

    monkeypatch.setattr(shared_memory, "user_of", stranger_to_the_sender)
    trainer, rollout = meeting()
    with pytest.raises(ServiceFault, match="trainer: rendezvous: rollout-0 did not connect"):
        trainer.result(PATIENCE)
    rollout.result(PATIENCE).abort()


FILLS = """
import os, socket, sys
os.setuid(12345)
names = [name for line in open("/proc/net/unix") for name in [line.split()[-1]] if name.startswith("@sluice-weights-")]
held = []
for name in (sys.argv[1], chr(0) + sys.argv[1], *(chr(0) + name[1:] for name in names)):
    try:
        while True:
            held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            held[-1].setblocking(False)
            held[-1].connect(name)
    except OSError:
        held.pop()
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's process")
def test_another_user_fills_no_queue_of_those_who_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    cards_of, filling = shared_memory.cards_of, []

    def seen_by_a_stranger(*where: Any) -> list[str]:
        (card,) = cards_of(*where)
        command = (sys.executable, "-S", "-c", FILLS, card)
        filling.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"))
        assert filling[0].stdout is not None
        assert filling[0].stdout.readline() == b"0\n"
        return [card]

    monkeypatch.setattr(shared_memory, "cards_of", seen_by_a_stranger)
    try:
        for member in meeting():
            member.result(PATIENCE).abort()
    finally:
        for each in filling:
            each.communicate(timeout=PATIENCE)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's process")
def test_the_kernel_tells_a_process_of_another_user() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"sluice-test-{secrets.token_hex(8)}"
        listener.bind(f"\0{name}")
        listener.listen(1)
        code = f"import os, socket; os.setuid(65534); s = socket.socket(1, 5); s.connect(chr(0) + '{name}'); s.recv(1)"
        child = subprocess.Popen([sys.executable, "-S", "-c", code])
        listener.settimeout(PATIENCE)
        try:
            with listener.accept()[0] as peer:
                assert shared_memory.user_of(peer) == 65534
        finally:
            child.kill()
            child.wait()


# ------------------------------------------------------------------------------------------------ how members meet
FORGED = "in the group's store was written by a process that does not have the group's key"


@pytest.mark.parametrize("transport", ["collective", "shared_memory+delta"])
def test_the_rendezvous_names_who_is_missing(transport: str) -> None:
    transport, full_every = transport_and_encoding(transport)
    names = ("trainer", "rollout-0", "rollout-1")
    machines = machines_of(transport, 1, 4)
    address = unhosted(4, 2.0, machines=machines, full_every=full_every, names=names)
    pending = open_rendezvous(address, "127.0.0.1", name="trainer")
    other = in_thread(
        "join", lambda: join_rendezvous(msgspec.structs.replace(pending.address, rank=2, timeout=PATIENCE), "rollout-1")
    )
    with pytest.raises(ServiceFault, match=r"trainer: rendezvous: rank 1 \(rollout-0\), rank 3 did not join \(deadline 2 s\)"):
        pending.connect()
    with pytest.raises(ServiceFault, match="rollout-1: rendezvous: "):
        other.result(2 * PATIENCE)


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = GroupAddress(epoch=1, host="127.0.0.1", port=port, rank=1, world_size=2, backend="gloo", timeout=0.3, key=b"")
    with pytest.raises(ServiceFault, match=f"rollout-0: rendezvous: rank 0 at 127.0.0.1:{port} cannot be reached"):
        join_rendezvous(address, "rollout-0")


def test_the_rendezvous_listens_on_the_given_interface_alone() -> None:
    pending = open_rendezvous(unhosted(), "lo")
    assert pending.address.host == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", pending.address.port), 1.0):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", pending.address.port), 1.0):
        pass


def test_the_rendezvous_takes_a_port_of_the_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"^network.port_range: all ports from {port} to {port} are in use on 127.0.0.1$"):
            open_rendezvous(unhosted(), "lo", port_range=(port, port))
    pending = open_rendezvous(unhosted(), "lo", port_range=(port, port))
    assert pending.address.port == port
    pending.abort()


def test_a_user_mistake_is_one_line() -> None:
    with pytest.raises(UserError, match=r"network\.interface") as caught:
        open_rendezvous(unhosted(), "nowhere0")
    assert "\n" not in str(caught.value)


LEAVE_AND_END = """
from tests.loopback.weight_cases import connected
for group in connected("collective", 3):
    group.abort()
"""


def test_a_process_that_ends_as_it_leaves_its_groups_ends_well() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVE_AND_END], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr


# ------------------------------------------------------------------------------------------------ strangers
@pytest.fixture(params=("collective", "shared_memory"))
def pending(request: pytest.FixtureRequest) -> Iterator[WeightGroup]:
    pending = open_rendezvous(unhosted(machines=machines_of(request.param, 1, 2)), "127.0.0.1", name="trainer")
    yield pending
    pending.abort()


@pytest.fixture
def met(pending: WeightGroup) -> Iterator[list[WeightGroup]]:
    other = in_thread("join", lambda: join_rendezvous(second(pending.address), "rollout-0"))
    members = [pending.connect(), other.result(PATIENCE)]
    yield members
    for group in members:
        group.abort()


def second(address: GroupAddress) -> GroupAddress:
    return msgspec.structs.replace(address, rank=1)


def stranger(address: GroupAddress) -> Any:
    return dist.TCPStore(address.host, address.port, is_master=False, wait_for_workers=False)


def names(store: Any) -> list[str]:
    """Those that a member has set: the store's own counters aside."""
    return [name for name in store.list_keys() if "init/" not in name]


def appear(store: Any, before: frozenset[str] = frozenset()) -> frozenset[str]:
    """The names that are there besides those `before`, once there are any."""
    give_up = time.monotonic() + PATIENCE
    while not (new := frozenset(names(store)) - before):
        assert time.monotonic() < give_up
    return new


def test_what_a_stranger_sets_announces_nothing_and_the_next_comes(met: list[WeightGroup], pending: WeightGroup) -> None:
    receiver = StagedWeights(MANIFEST)
    reception = posted(receiver, met[1], VERSION, PATIENCE)
    store = stranger(pending.address)
    for name in ("transfer/1", "epoch/1/transfer/1", *names(store)):
        store.set(name, b"")
    for name in names(store):
        store.delete_key(name)
    assert not reception.done()
    sender = SendBuffers(MANIFEST)
    gather(sender, 1)
    sender.send(met[0], VERSION, PATIENCE).result(PATIENCE)
    assert same(reception.result(PATIENCE).tensors(), 1)


def test_an_announcement_that_was_overwritten_is_refused_by_name(met: list[WeightGroup], pending: WeightGroup) -> None:
    store = stranger(pending.address)
    before = frozenset(names(store))
    met[0].announce(VERSION)
    (name,) = appear(store, before)  # another connection's words may come before it
    store.set(name, b"")
    with pytest.raises(ServiceFault, match=rf"rollout-0: announce: .*: epoch/1/transfer/1 {FORGED}"):
        posted(StagedWeights(MANIFEST), met[1], VERSION, PATIENCE).result(PATIENCE)


def test_a_member_that_a_stranger_planted_is_refused_by_name(pending: WeightGroup) -> None:
    store, connecting = stranger(pending.address), in_thread("connect", pending.connect)
    for name in appear(store):
        store.set(name, "127.0.0.1 1 2")
    with pytest.raises(ServiceFault, match=rf"rollout-0: rendezvous: epoch/1/all/member/0 {FORGED}"):
        join_rendezvous(second(pending.address), "rollout-0")
    pending.abort()
    with pytest.raises(ServiceFault):
        connecting.result(PATIENCE)


def test_who_has_another_key_meets_nobody(pending: WeightGroup) -> None:
    connecting = in_thread("connect", pending.connect)
    with pytest.raises(ServiceFault, match=r"rendezvous: rank 0.* did not join"):
        join_rendezvous(msgspec.structs.replace(second(pending.address), key=new_key(), timeout=0.1), "stranger")
    pending.abort()
    with pytest.raises(ServiceFault):
        connecting.result(PATIENCE)


def test_a_value_in_the_place_of_another_or_of_another_group_is_refused() -> None:
    inner, key = dist.HashStore(), new_key()
    store = AuthenticatedStore(inner, key).within("epoch/1")
    store.set("member/0", "a")
    store.set("member/1", b"b")
    assert (store.get("member/0"), store.multi_get(["member/1"])) == (b"a", [b"b"])
    inner.set(store._name("member/1"), inner.get(store._name("member/0")))
    with pytest.raises(ForgedValue, match=f"epoch/1/member/1 {FORGED}"):
        store.get("member/1")
    inner.set(store._name("member/0"), b"")
    with pytest.raises(ForgedValue, match=f"epoch/1/member/0 {FORGED}"):
        store.get("member/0")
    assert not AuthenticatedStore(inner, new_key()).within("epoch/1").check(["member/0"])
    assert not AuthenticatedStore(inner, key).within("epoch/2").check(["member/0"])


def test_a_tag_is_of_one_bucket_of_one_version_in_one_group() -> None:
    tags, buffer = BucketTags(new_key()), torch.arange(1 << 12).to(torch.uint8)
    digest = tags.digest(buffer)
    tag = tags.tag(3, digest, VERSION)
    assert tag == tags.tag(3, digest, VERSION)
    assert tag != tags.tag(2, digest, VERSION), "another index"
    assert tag != tags.tag(3, digest, PolicyVersion(0, 2)), "another version"
    assert tag[:8] != tags.tag(3, digest, PolicyVersion(0, 2))[:8], "the hash covers the version"
    other = BucketTags(new_key())
    assert tag != other.tag(3, digest, VERSION) and digest != other.digest(buffer), "another epoch"
    for byte in (0, len(buffer) - 1):
        changed = buffer.clone()
        changed[byte] ^= 1
        assert tags.digest(changed) != digest, byte
    hasher = tags.hasher()
    for piece in buffer.split(1000):
        hasher.update(piece.numpy().data)
    assert hasher.intdigest() == digest


def test_a_bucket_of_another_epoch_is_refused_on_its_arrival(met: list[WeightGroup]) -> None:
    reception = posted(StagedWeights(MANIFEST), met[1], VERSION, PATIENCE)
    sender = SendBuffers(MANIFEST)
    gather(sender, 1)
    met[0].tags = BucketTags(new_key())
    sender.send(met[0], VERSION, PATIENCE).result(PATIENCE)
    with pytest.raises(ServiceFault, match=r"verify: .*bucket 0 of \d+ \(.*\): the checksum does not match"):
        reception.result(PATIENCE)
