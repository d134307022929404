"""Weight publication over real gloo: one sender here, two receivers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault, UserError
from runtime.types import PolicyVersion
from runtime.weights import sender as sender_module
from runtime.weights.group import WeightGroup, host, join
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec
from runtime.weights.receiver import Staged, WeightReceiver
from runtime.weights.sender import WeightSender, in_thread

ROOT = Path(__file__).parents[2]
SPECS = (
    TensorSpec("embed", "bfloat16", (50, 128)),
    TensorSpec("bias", "float32", (7,)),
    TensorSpec("scale", "float32", ()),
    TensorSpec("steps", "int64", (3, 5)),
    *(TensorSpec(f"layer.{index}", "float32", (64, 100)) for index in range(8)),
)
MANIFEST = Manifest(SPECS, 64 << 10)


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 100)


def expected(seed: int) -> dict[str, torch.Tensor]:
    tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS]
    fill(tensors, seed)
    return dict(zip((spec.name for spec in SPECS), tensors, strict=True))


def same(tensors: dict[str, torch.Tensor], seed: int) -> bool:
    want = expected(seed)
    return tensors.keys() == want.keys() and all(
        tensors[name].dtype == want[name].dtype and torch.equal(tensors[name], want[name]) for name in want
    )


def threads_and_files() -> list[int]:
    return [len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))]


def settles(counts: Callable[[], list[int]], most: list[int], seconds: float = 2.0) -> bool:
    """Whether threads that are just ending are gone in time."""
    give_up = time.monotonic() + seconds
    while any(count > limit for count, limit in zip(counts(), most, strict=True)):
        if time.monotonic() > give_up:
            return False
    return True


# ------------------------------------------------------------------------------- a receiver in its own process


def member() -> None:
    """Serve commands, one JSON line each, until stdin ends; answers come as they are ready."""
    torch.set_num_threads(1)
    receiver = WeightReceiver(MANIFEST)
    group: WeightGroup | None = None
    for line in sys.stdin:
        op, *rest = json.loads(line)
        if op == "join":
            group = None
            group = join(msgspec.convert(rest[0], GroupAddress), rest[1])
            answer("joined", group.rank)
        elif op == "receive":
            assert group is not None
            version, deadline = rest
            receiver.receive(group, PolicyVersion(0, version), deadline).add_done_callback(report)
            answer("posted", version)
        elif op == "leave":
            if group is not None:
                group.abort()
            answer("left", 0)
        else:
            answer("counts", threads_and_files())


def answer(*words: Any) -> None:
    print(json.dumps(words), flush=True)


def report(future: Future[Staged]) -> None:
    error = future.exception()
    if isinstance(error, ServiceFault):
        answer("fault", error.phase, str(error))
    elif error is not None:
        answer("error", repr(error))
    else:
        staged = future.result()
        whole = same(staged.tensors(), staged.version.step)
        staged.release()
        answer("staged", staged.version.step, whole)


class Member:
    def __init__(self, name: str):
        self.name = name
        code = "from tests.loopback.test_weights import member; member()"
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self) -> list[Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    torch.set_num_threads(1)
    started = [Member(f"rollout-{index}") for index in range(2)]
    try:
        yield started
    finally:
        for one in started:
            one.end()


def connect(members: list[Member], epoch: int, timeout: float = 20.0) -> WeightGroup:
    pending = host(epoch, len(members) + 1, "127.0.0.1", "gloo", timeout, "trainer")
    for rank, one in enumerate(members, 1):
        one.tell("join", msgspec.to_builtins(msgspec.structs.replace(pending.address, rank=rank)), one.name)
    group = pending.connect(["trainer", *(one.name for one in members)])
    for rank, one in enumerate(members, 1):
        assert one.hear() == ["joined", rank]
    return group


def post(members: list[Member], version: int, deadline: float) -> None:
    for one in members:
        one.tell("receive", version, deadline)
        assert one.hear() == ["posted", version]


def leave(members: list[Member], group: WeightGroup) -> None:
    group.abort()
    for one in members:
        one.tell("leave")
        assert one.hear()[0] == "left"


def test_two_processes_receive_every_version_whole(members: list[Member]) -> None:
    group = connect(members, 1)
    sender = WeightSender(MANIFEST)
    assert len(sender.buckets) > 3
    for version in range(4):
        post(members, version, 10.0)
        fill(sender.views(5.0), version)
        result = sender.send(group, PolicyVersion(0, version), 10.0).result(10)
        assert result.nbytes == sum(bucket.total_bytes for bucket in sender.buckets)
        assert [one.hear() for one in members] == [["staged", version, True]] * 2
    leave(members, group)


def test_a_corrupted_bucket_is_caught_and_named(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    group = connect(members, 2)
    sender = WeightSender(MANIFEST)
    stamp = sender_module.stamp

    def stamp_then_flip(bucket: Any, buffer: torch.Tensor, version: PolicyVersion) -> None:
        stamp(bucket, buffer, version)
        if bucket is sender.buckets[2]:
            buffer[5] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(sender_module, "stamp", stamp_then_flip)
        post(members, 1, 10.0)
        fill(sender.views(5.0), 1)
        sender.send(group, PolicyVersion(0, 1), 10.0).result(10)
    for one in members:
        kind, phase, text = one.hear()
        assert (kind, phase) == ("fault", "verify")
        assert one.name in text and f"bucket 2 of {len(sender.buckets)}: the checksum" in text
        assert "bucket 1 of" not in text
    post(members, 2, 10.0)  # the group is whole
    fill(sender.views(5.0), 2)
    sender.send(group, PolicyVersion(0, 2), 10.0).result(10)
    assert [one.hear() for one in members] == [["staged", 2, True]] * 2
    leave(members, group)


def test_a_stopped_receiver_ends_everyone_in_time_and_leaves_nothing(members: list[Member]) -> None:
    def counts() -> list[int]:
        for one in members:
            one.tell("counts")
        return [*threads_and_files(), *members[0].hear()[1], *members[1].hear()[1]]

    sender = WeightSender(MANIFEST)
    before = counts()
    group = connect(members, 3)
    post(members, 1, 30.0)
    stopped, innocent = members
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"trainer: transfer: bucket 0 of \d+ of version 0\.1 was not taken"):
            sender.send(group, PolicyVersion(0, 1), 0.5).result(10)
        kind, phase, text = innocent.hear()
        assert (kind, phase) == ("fault", "transfer"), text
        assert time.monotonic() - began < 2.0
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.hear()[0] == "fault"
    del group
    for one in members:
        one.tell("leave")
        assert one.hear()[0] == "left"
    assert settles(counts, before)

    group = connect(members, 4)  # a new epoch goes on with the same buffers
    post(members, 5, 10.0)
    fill(sender.views(5.0), 5)
    sender.send(group, PolicyVersion(0, 5), 10.0).result(10)
    assert [one.hear() for one in members] == [["staged", 5, True]] * 2
    leave(members, group)


# ------------------------------------------------------------------------------------ cheap cases, in threads


def connected(world_size: int = 2, timeout: float = 10.0) -> list[WeightGroup]:
    torch.set_num_threads(1)
    pending = host(1, world_size, "127.0.0.1", "gloo", timeout, "trainer")
    others = [
        in_thread("join", lambda rank=rank: join(msgspec.structs.replace(pending.address, rank=rank), f"rollout-{rank}"))
        for rank in range(1, world_size)
    ]
    return [pending.connect(), *(other.result(10) for other in others)]


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
    pair[0].announce()
    with pytest.raises(DeadlineExceeded, match="rollout-1: transfer: bucket 0 of") as caught:
        reception.result(5)
    assert caught.value.deadline == 0.3


@pytest.mark.parametrize("announced", [False, True], ids=["before", "during"])
def test_abort_frees_a_blocked_reception_at_once(pair: list[WeightGroup], announced: bool) -> None:
    receiver = WeightReceiver(MANIFEST)
    reception = receiver.receive(pair[1], PolicyVersion(0, 1), 60.0)
    if announced:
        pair[0].announce()
    with pytest.raises(TimeoutError):
        wait(reception, 0.1)
    began = time.monotonic()
    receiver.abort()
    with pytest.raises(Cancelled, match=r"version 0\.1 was withdrawn"):
        reception.result(5)
    assert time.monotonic() - began < 0.5


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
    receivers = [WeightReceiver(MANIFEST) for _ in range(2)]
    threads_before, files_before = threads_and_files()

    def one_epoch(announce: bool) -> None:
        groups = connected(3)
        receptions = [
            receiver.receive(group, PolicyVersion(0, 1), 60.0) for receiver, group in zip(receivers, groups[1:], strict=True)
        ]
        if announce:
            groups[0].announce()
        for group in groups:
            group.abort()
        for reception in receptions:
            with suppress(ServiceFault, Cancelled):
                reception.result(5)

    one_epoch(True)
    assert settles(threads_and_files, [threads_before + 1, files_before + 4])  # torch's own, once for the process
    before = threads_and_files()
    for index in range(20):
        one_epoch(bool(index % 2))
    assert settles(threads_and_files, before)


def test_the_rendezvous_names_who_is_missing() -> None:
    pending = host(1, 4, "127.0.0.1", "gloo", 3.0, "trainer")
    other = in_thread("join", lambda: join(msgspec.structs.replace(pending.address, rank=2), "rollout-1"))
    with pytest.raises(
        ServiceFault, match=r"trainer: rendezvous: rank 1 \(rollout-0\), rank 3 did not join \(deadline 3 s\)"
    ):
        pending.connect(["trainer", "rollout-0", "rollout-1"])
    with pytest.raises(ServiceFault, match="rollout-1: rendezvous: "):
        other.result(15)


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = GroupAddress(epoch=1, host="127.0.0.1", port=port, rank=1, world_size=2, backend="gloo", timeout=0.3)
    with pytest.raises(ServiceFault, match=f"rollout-0: rendezvous: rank 0 at 127.0.0.1:{port} cannot be reached"):
        join(address, "rollout-0")


def test_the_rendezvous_listens_on_the_given_interface_alone() -> None:
    pending = host(1, 2, "lo", "gloo", 1.0)
    assert pending.address.host == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", pending.address.port), 1.0):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", pending.address.port), 1.0):
        pass


@pytest.mark.parametrize(
    ("interface", "backend", "fault"), [("nowhere0", "gloo", "network.interface"), ("lo", "mpi", "backend")]
)
def test_a_user_mistake_is_one_line(interface: str, backend: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        host(1, 2, interface, backend, 1.0)
    assert "\n" not in str(caught.value)
