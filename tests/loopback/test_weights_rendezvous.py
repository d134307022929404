"""How the members of a weight group find each other, what a user may have set wrongly, and what somebody who reaches the
group's store, but does not have its key, can make the members believe: nothing.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from runtime.errors import ServiceFault, UserError
from runtime.weights.authentication import AuthenticatedStore, BucketTags, ForgedValue, new_key
from runtime.weights.group import PendingGroup, WeightGroup
from runtime.weights.plan import TRAILER, Bucket, GroupAddress
from runtime.weights.receiver import WeightReceiver
from runtime.weights.rendezvous import host, join
from runtime.weights.sender import WeightSender, in_thread
from tests.loopback.weight_cases import MANIFEST, PATIENCE, VERSION, gather, same, transport_and_encoding
from tests.loopback.weight_members import ROOT

FORGED = "in the group's store was written by somebody who does not have the group's key"


@pytest.mark.parametrize("transport", ["collective", "shared_memory+delta", "files"])
def test_the_rendezvous_names_who_is_missing(transport: str, tmp_path: Path) -> None:
    transport, full_every = transport_and_encoding(transport)
    names = ("trainer", "rollout-0", "rollout-1")
    pending = host(1, 4, "127.0.0.1", "gloo", 2.0, "trainer", transport, str(tmp_path), full_every, names=names)
    other = in_thread("join", lambda: join(msgspec.structs.replace(pending.address, rank=2, timeout=PATIENCE), "rollout-1"))
    with pytest.raises(ServiceFault, match=r"trainer: rendezvous: rank 1 \(rollout-0\), rank 3 did not join \(deadline 2 s\)"):
        pending.connect()
    gone = r"rank 0 \(trainer\) is gone" if transport == "files" else ""
    with pytest.raises(ServiceFault, match=f"rollout-1: rendezvous: {gone}"):
        other.result(2 * PATIENCE)
    assert not list(tmp_path.iterdir())


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = GroupAddress(epoch=1, host="127.0.0.1", port=port, rank=1, world_size=2, backend="gloo", timeout=0.3, key=b"")
    with pytest.raises(ServiceFault, match=f"rollout-0: rendezvous: rank 0 at 127.0.0.1:{port} cannot be reached"):
        join(address, "rollout-0")


def test_the_rendezvous_listens_on_the_given_interface_alone() -> None:
    pending = host(1, 2, "lo", "gloo", 1.0)
    assert pending.address.host == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", pending.address.port), 1.0):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", pending.address.port), 1.0):
        pass


def test_the_rendezvous_takes_a_port_of_the_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"^network.port_range: all ports from {port} to {port} are in use on 127.0.0.1$"):
            host(1, 2, "lo", "gloo", 1.0, port_range=(port, port))
    pending = host(1, 2, "lo", "gloo", 1.0, port_range=(port, port))
    assert pending.address.port == port
    pending.abort()


@pytest.mark.parametrize(
    ("interface", "backend", "fault"), [("nowhere0", "gloo", "network.interface"), ("lo", "mpi", "backend")]
)
def test_a_user_mistake_is_one_line(interface: str, backend: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        host(1, 2, interface, backend, 1.0)
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
def pending(request: pytest.FixtureRequest) -> Iterator[PendingGroup]:
    pending = host(1, 2, "127.0.0.1", "gloo", PATIENCE, "trainer", request.param)
    yield pending
    pending.abort()


@pytest.fixture
def groups(pending: PendingGroup) -> Iterator[list[WeightGroup]]:
    other = in_thread("join", lambda: join(second(pending.address), "rollout-0"))
    groups = [pending.connect(), other.result(PATIENCE)]
    yield groups
    for group in groups:
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


def test_what_a_stranger_sets_announces_nothing_and_the_next_version_comes(
    groups: list[WeightGroup], pending: PendingGroup
) -> None:
    receiver = WeightReceiver(MANIFEST)
    reception = receiver.receive(groups[1], VERSION, PATIENCE)
    store = stranger(pending.address)
    for name in ("transfer/1", "epoch/1/transfer/1", *names(store)):
        store.set(name, b"")
    for name in names(store):
        store.delete_key(name)
    assert not reception.done()
    sender = WeightSender(MANIFEST)
    gather(sender, 1)
    sender.send(groups[0], VERSION, PATIENCE).result(PATIENCE)
    assert same(reception.result(PATIENCE).tensors(), 1)


def test_an_announcement_that_was_overwritten_is_refused_by_name(groups: list[WeightGroup], pending: PendingGroup) -> None:
    store = stranger(pending.address)
    before = frozenset(names(store))
    groups[0].announce(VERSION)
    (name,) = appear(store, before)  # another connection's words may come before it
    store.set(name, b"")
    with pytest.raises(ServiceFault, match=rf"rollout-0: announce: .*: epoch/1/transfer/1 {FORGED}"):
        WeightReceiver(MANIFEST).receive(groups[1], VERSION, PATIENCE).result(PATIENCE)


def test_a_member_that_a_stranger_planted_is_refused_by_name(pending: PendingGroup) -> None:
    store, connecting = stranger(pending.address), in_thread("connect", pending.connect)
    for name in appear(store):
        store.set(name, "127.0.0.1 1 2")
    with pytest.raises(ServiceFault, match=rf"rollout-0: rendezvous: epoch/1/sender/0/member/0 {FORGED}"):
        join(second(pending.address), "rollout-0")
    pending.abort()
    with pytest.raises(ServiceFault):
        connecting.result(PATIENCE)


def test_who_has_another_key_meets_nobody(pending: PendingGroup) -> None:
    connecting = in_thread("connect", pending.connect)
    with pytest.raises(ServiceFault, match=r"rendezvous: rank 0.* did not join"):
        join(msgspec.structs.replace(second(pending.address), key=new_key(), timeout=0.1), "stranger")
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


def test_a_bucket_that_was_tampered_with_or_is_another_is_refused() -> None:
    bucket, tags = Bucket((), 1 << 12), BucketTags(new_key())
    buffer = torch.arange(bucket.total_bytes).to(torch.uint8)
    digest = tags.stamp(3, bucket, buffer, VERSION)
    assert tags.verify(3, bucket, buffer) and tags.verify(3, bucket, buffer, digest)
    assert not tags.verify(2, bucket, buffer), "another index"
    assert not BucketTags(new_key()).verify(3, bucket, buffer), "another epoch"
    for byte in (0, bucket.data_bytes - 1, bucket.data_bytes, bucket.data_bytes + TRAILER.size - 1):  # data, tag, version
        changed = buffer.clone()
        changed[byte] ^= 1
        assert not tags.verify(3, bucket, changed), byte
    hasher = tags.hasher()
    hasher.update(buffer.numpy()[: bucket.data_bytes].data)
    assert hasher.intdigest() == digest


def test_a_bucket_of_another_epoch_is_refused_on_its_arrival(groups: list[WeightGroup]) -> None:
    reception = WeightReceiver(MANIFEST).receive(groups[1], VERSION, PATIENCE)
    sender = WeightSender(MANIFEST)
    gather(sender, 1)
    groups[0].tags = BucketTags(new_key())
    sender.send(groups[0], VERSION, PATIENCE).result(PATIENCE)
    with pytest.raises(ServiceFault, match=r"verify: .*bucket 0 of \d+: the checksum does not match"):
        reception.result(PATIENCE)
