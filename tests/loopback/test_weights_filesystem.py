"""Weights by way of a shared folder: what lies in it, when it goes, and what is said when it cannot be used."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from runtime.errors import DeadlineExceeded, ServiceFault, SluiceError, UserError
from runtime.types import PolicyVersion
from runtime.weights import files
from runtime.weights.group import PendingGroup, WeightGroup
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec
from runtime.weights.receiver import WeightReceiver
from runtime.weights.rendezvous import host, join
from runtime.weights.sender import WeightSender, in_thread
from runtime.weights.tensor_files import TensorReader, TensorWriter
from tests.loopback.ranks import Helper
from tests.loopback.weight_cases import MANIFEST, PATIENCE, VERSION, expected, gather, same, settles


def hosted(
    folder: Path, world_size: int = 2, timeout: float = PATIENCE, epoch: int = 1, names: Sequence[str] = ()
) -> PendingGroup:
    return host(epoch, world_size, "lo", "gloo", timeout, "trainer", "files", str(folder), names=names)


def joined(address: GroupAddress, rank: int = 1) -> WeightGroup:
    return join(msgspec.structs.replace(address, rank=rank), f"rollout-{rank - 1}")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[WeightGroup]]:
    pending = hosted(tmp_path)
    other = in_thread("join", lambda: joined(pending.address))
    groups = [pending.connect(), other.result(PATIENCE)]
    try:
        yield groups
    finally:
        for group in groups:
            group.abort()
        assert not list(tmp_path.glob("epoch-*"))


def until(holds: Callable[[], bool]) -> None:
    assert settles(lambda: [not holds()], [0])


def publish(group: WeightGroup, sender: WeightSender, step: int) -> None:
    gather(sender, step)
    sender.send(group, PolicyVersion(0, step), PATIENCE).result(PATIENCE)


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("epoch-0001/*version*"))


def test_a_version_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    state = LlamaForCausalLM(config).to(torch.bfloat16).state_dict()
    specs = tuple(TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in state.items())
    group = hosted(tmp_path, world_size=1).connect()
    sender = WeightSender(Manifest(specs, 8192))
    sender.fill(state.values())
    sent = sender.send(group, PolicyVersion(0, 7), PATIENCE).result(PATIENCE)

    (folder,) = tmp_path.glob("epoch-0001/*-version-0.7")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == len(sender.buckets) > 2
    assert sent.nbytes == sum(file.stat().st_size for file in files)
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata()["version"] == "0.7"
    (index,) = folder.glob("model.safetensors.index.json")
    assert json.loads(index.read_text())["metadata"]["total_size"] == sum(spec.nbytes for spec in specs)
    config.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).state_dict()
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
    group.abort()


def test_two_versions_are_kept_and_nothing_after_the_end(pair: list[WeightGroup], tmp_path: Path) -> None:
    sender, receiver = WeightSender(MANIFEST), WeightReceiver(MANIFEST)
    for step in range(4):
        publish(pair[0], sender, step)
        staged = receiver.receive(pair[1], PolicyVersion(0, step), PATIENCE).result(PATIENCE)
        assert same(staged.tensors(), step)
        for buffer in staged._set.buffers:
            buffer.fill_(step + 1)  # what an engine leaves there
        staged.release()
    assert versions(tmp_path) == ["000003-version-0.2", "000004-version-0.3"]
    pair[0].abort()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("shorter", "transfer: bucket 1 of .*model-00002-of.*not a whole"),
        ("another", "transfer: bucket 1 of .*model-00002-of.*does not hold bucket 1"),
        ("trailer", "transfer: bucket 1 of .*model-00002-of.*(not a whole|does not hold bucket 1)"),
        ("byte", r"verify: version 0\.1: bucket 1 of \d+: the checksum"),
    ],
)
def test_a_file_that_is_not_what_was_sent_is_refused(pair: list[WeightGroup], tmp_path: Path, damage: str, said: str) -> None:
    publish(pair[0], WeightSender(MANIFEST), 1)
    files = sorted(tmp_path.glob("epoch-*/*/*.safetensors"))
    content, other = files[1].read_bytes(), files[2].read_bytes()
    start = content.index(b'"trailer":"') + len(b'"trailer":"')
    no_number = content[:start] + b"x" + content[start + 1 :]
    changed = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    files[1].write_bytes({"shorter": content[:-1], "another": other, "trailer": no_number, "byte": changed}[damage])
    with pytest.raises(ServiceFault, match=f"rollout-0: {said}"):
        WeightReceiver(MANIFEST).receive(pair[1], VERSION, PATIENCE).result(PATIENCE)
    assert pair[1].aborted == (damage != "byte")


def stick_within_a_write(connection: Any) -> None:
    """The sender: it says when it is to be met, and that it is within its write of one tensor, at which it stays."""
    pending = host(1, 2, "lo", "gloo", PATIENCE, "trainer", "files", connection.recv()[0])
    connection.send("hosted")
    group, write = pending.connect(), TensorWriter.write

    def stuck(self: TensorWriter, name: str, *rest: Any) -> None:
        write(self, name, *rest)
        if name == "layer.2":
            connection.send("within")
            connection.recv()

    TensorWriter.write = stuck
    sender = WeightSender(MANIFEST)
    gather(sender, 1)
    sender.send(group, VERSION, 10 * PATIENCE).result()


def test_a_sender_killed_within_a_write_leaves_only_whole_files_and_the_next_host_removes_them(tmp_path: Path) -> None:
    trainer = Helper(stick_within_a_write)
    try:
        trainer.tell(str(tmp_path))
        assert trainer.hear() == "hosted"
        group = joined(
            GroupAddress(
                epoch=1,
                host="",
                port=0,
                rank=1,
                world_size=2,
                backend="",
                timeout=PATIENCE,
                key=b"",
                transport="files",
                folder=str(tmp_path),
            )
        )
        reception = WeightReceiver(MANIFEST).receive(group, VERSION, 1.0)
        assert trainer.hear() == "within"
    finally:
        trainer.end()
    with pytest.raises(DeadlineExceeded, match=r"rollout-0: transfer: bucket \d+ of \d+ .*safetensors did not appear"):
        reception.result(PATIENCE)
    (folder,) = tmp_path.glob("epoch-0001/*-version-0.1")
    assert list(folder.glob(".*.partial")) and not list(folder.glob("*.json"))
    found = contents(folder)
    assert 0 < len(found) < len(MANIFEST.tensors)
    assert all(torch.equal(tensor, expected(1)[name]) for name, tensor in found.items())
    hosted(tmp_path, epoch=2).abort()
    assert not list(tmp_path.iterdir())


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def test_the_next_host_removes_what_is_of_its_kind_alone(tmp_path: Path) -> None:
    mine = ["epoch-1", "epoch-0004/weights.bin", "notes.txt", "epoch-0005x/sluice-weights"]
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    for name in ("epoch-0003/sluice-weights", "epoch-0003/000001-version-0.0/a", "epoch-0002.removed-1-2/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "epoch-0006").mkdir()
    hosted(tmp_path, epoch=7).abort()
    assert all((tmp_path / name).read_text() == "mine" for name in mine)
    assert {path.name for path in tmp_path.iterdir()} == {Path(name).parts[0] for name in mine}
    with pytest.raises(UserError, match=r"^publication\.folder: \S+/epoch-0004 exists already, and is no folder of Sluice's$"):
        hosted(tmp_path, epoch=4)


def test_a_folder_that_is_not_shared_is_called_so(tmp_path: Path) -> None:
    pending = hosted(tmp_path / "here")
    elsewhere = msgspec.structs.replace(pending.address, rank=1, timeout=0.2, folder=str(tmp_path / "there"))
    with pytest.raises(
        ServiceFault, match=r"rollout-0: rendezvous: \S+/there/epoch-0001, .* is not seen here: publication\.folder"
    ):
        join(elsewhere, "rollout-0")
    pending.abort()


def test_the_rendezvous_names_who_is_missing(tmp_path: Path) -> None:
    pending = hosted(tmp_path, world_size=4, timeout=0.5, names=("trainer", "a", "b"))
    address = msgspec.structs.replace(pending.address, timeout=PATIENCE)
    other = in_thread("join", lambda: joined(address, 2))
    until(lambda: bool(list(tmp_path.glob("*/member-2"))))
    with pytest.raises(ServiceFault, match=r"trainer: rendezvous: rank 1 \(a\), rank 3 did not join \(deadline 0.5 s\)"):
        pending.connect()
    with pytest.raises(ServiceFault, match=r"rollout-1: rendezvous: rank 0 \(trainer\) is gone"):
        other.result(PATIENCE)
    assert not list(tmp_path.iterdir())


def test_a_rendezvous_that_is_given_up_ends_for_everyone(tmp_path: Path) -> None:
    pending = hosted(tmp_path, world_size=3, timeout=10 * PATIENCE)
    waiting = [in_thread("join", lambda: joined(pending.address)), in_thread("connect", pending.connect)]
    until(lambda: bool(list(tmp_path.glob("*/member-1"))))
    pending.abort()
    for one in waiting:
        with pytest.raises(ServiceFault, match="rendezvous: "):
            one.result(PATIENCE)


def test_the_sender_sees_who_left(pair: list[WeightGroup]) -> None:
    sender = WeightSender(MANIFEST)
    publish(pair[0], sender, 1)
    pair[1].abort()
    with pytest.raises(
        ServiceFault, match=r"trainer: transfer: bucket 0 of .* of version 0\.2 was not taken: rank 1 left the group"
    ):
        sender.send(pair[0], PolicyVersion(0, 2), PATIENCE).result(PATIENCE)


def failing(code: int, name: str) -> Callable[..., None]:
    write = TensorWriter.write

    def fail(self: TensorWriter, tensor: str, *rest: object) -> None:
        if tensor == name:
            raise OSError(code, os.strerror(code))
        write(self, tensor, *rest)  # type: ignore[arg-type]

    return fail


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, UserError), (errno.EACCES, UserError), (errno.EIO, ServiceFault)],
)
def test_a_write_that_fails_names_folder_and_bucket(
    pair: list[WeightGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[SluiceError]
) -> None:
    sender = WeightSender(MANIFEST)
    gather(sender, 3)
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(0, 3), 10 * PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(files.TensorWriter, "write", failing(code, "layer.3"))
        words = rf"{tmp_path}/epoch-0001/000001-version-0\.3: bucket \d of {len(sender.buckets)} cannot be written: "
        with pytest.raises(kind, match=words + os.strerror(code)) as caught:
            sender.send(pair[0], PolicyVersion(0, 3), PATIENCE).result(PATIENCE)
    assert "\n" not in str(caught.value)
    with pytest.raises(ServiceFault, match=r"rollout-0: \w+: .* rank 0 left the group"):  # at once, not at its deadline
        reception.result(PATIENCE)
    sender.begin(PATIENCE)


def test_an_epoch_removed_after_its_file_was_seen_is_a_sender_that_left(
    pair: list[WeightGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = WeightSender(MANIFEST)
    gather(sender, 3)

    def late(path: Path) -> TensorReader:
        pair[0].abort()
        return TensorReader(path)

    monkeypatch.setattr(files, "TensorReader", late)
    reception = WeightReceiver(MANIFEST).receive(pair[1], PolicyVersion(0, 3), 10 * PATIENCE)
    with suppress(ServiceFault):  # all may be written before the first file is read
        sender.send(pair[0], PolicyVersion(0, 3), PATIENCE).result(PATIENCE)
    with pytest.raises(ServiceFault, match=r"rollout-0: transfer: .* rank 0 left the group"):
        reception.result(PATIENCE)


def test_a_folder_that_cannot_be_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        with pytest.raises(UserError, match=r"^publication\.folder: .*file") as caught:
            hosted(tmp_path / folder)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"^publication\.folder: '' is no folder"):
        host(1, 2, "lo", "gloo", 1.0, "trainer", "files")
