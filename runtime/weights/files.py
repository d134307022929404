"""Transport `files`: versions as Hugging Face weights in a shared folder, for machines without network ports between them.

Only `publication.transport: files` selects this transport; `auto` never does.

    FOLDER/epoch-0003/
      sluice-weights                        the marker: shows the other members that they share the folder
      member-1                              while rank 1 is in the group
      000002-version-0.7/                   the second transfer of this epoch; the newest two are kept
        model-00001-of-00004.safetensors    one file a bucket, with the bucket's trailer in the metadata
        model.safetensors.index.json        last; absent if a file holds a delta

A file gets its name once it is whole. The next host of the folder removes the files of a killed host.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path

import torch
from msgspec import structs

from runtime import timeouts
from runtime.errors import ServiceFault, UserError
from runtime.process.aio import in_thread
from runtime.types import PolicyVersion
from runtime.weights.delta import DeltaDecoder, DeltaEncoder, Positions, TensorReader, TensorWriter
from runtime.weights.group import Deferred, PendingGroup, Transfer, WeightGroup, clear, tensors_in
from runtime.weights.plan import TRAILER, Bucket, GroupAddress, Manifest, TensorSpec, plan_buckets

# ---- Shared folder
#
# Make, list and remove the epochs' folders in a folder that machines share.

MARKER = "sluice-weights"  # in each epoch's folder: only folders with the marker are removed
_EPOCH = re.compile(r"epoch-\d{4,}")
_REMOVED = re.compile(r"epoch-\d{4,}\.removed-\d+-\d+")


def epoch_folder(root: Path, epoch: int) -> Path:
    return root / f"epoch-{epoch:04d}"


def open_epoch(root: Path, epoch: int) -> None:
    """Make the folder of `epoch` with its marker. Removes all earlier epochs in `root`. Raises UserError if `root` cannot be
    written, or has an entry of the epoch's name without the marker."""
    folder = epoch_folder(root, epoch)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in sorted(root.iterdir()):
            if _is_ours(left):
                remove_folder(left)
        folder.mkdir()
        (folder / MARKER).write_text(f"made by process {os.getpid()}; removed with its run\n", encoding="utf-8")
    except FileExistsError as error:
        raise UserError(f"publication.folder: {error.filename} exists already, and is no folder of Sluice's") from error
    except OSError as error:
        raise UserError(f"publication.folder: {root} cannot be written: {error.strerror}") from error


def _is_ours(path: Path) -> bool:
    if _REMOVED.fullmatch(path.name):
        return True
    if not _EPOCH.fullmatch(path.name) or not path.is_dir():
        return False
    inside = names(path)
    return MARKER in inside or not inside  # empty: a host was killed before it wrote the marker


def names(folder: Path) -> list[str]:
    """List the names in `folder`: a listing asks the server, while an NFS client may answer a test for one name from its cache.
    Raises OSError."""
    return os.listdir(folder)  # noqa: PTH208 - only the names are used


def remove_folder(folder: Path) -> None:
    """Rename the folder, so that it disappears at once, then remove its files if the file system allows it. Raises OSError."""
    removed = folder
    if not _REMOVED.fullmatch(folder.name):
        removed = folder.with_name(f"{folder.name}.removed-{os.getpid()}-{time.monotonic_ns()}")
        try:
            folder.rename(removed)
        except FileNotFoundError:
            return
    shutil.rmtree(removed, ignore_errors=True)


KEPT = 2  # versions: the newest, and the version before, which may still be read
_DELTA = "delta"  # the only tensor in the file of a delta
INDEX = "model.safetensors.index.json"
_TRAILER = re.compile(rf"[0-9a-f]{{{2 * TRAILER.size}}}")

# Errors that the user can mend; any other error is a fault of the machine.
_USERS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class FilesGroup(WeightGroup):
    """A group without connections. A missing folder shows that rank 0 left, a missing file that another member left. So this
    group cannot see that a member was killed. The coordinator sees the loss, and aborts the group."""

    def __init__(self, address: GroupAddress, name: str, folder: Path):
        super().__init__(address, name)
        self._epoch_folder = folder
        self._label = address.label
        self._left = threading.Event()
        self._leaving = threading.Lock()
        self._manifest: Manifest | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._versions: list[Path] = []
        self._transfers = 0
        self._writing: futures.Future[None] | None = None
        self._encoder = DeltaEncoder(address.full_every or 1)
        self._decoder = DeltaDecoder()
        self._encodes = address.full_every > 0
        self._deltas = False  # whether any bucket of the version being written is a delta

    def set_manifest(self, manifest: Manifest) -> None:
        if manifest is not self._manifest:
            self._manifest, self._buckets = manifest, plan_buckets(manifest)

    def announce(self, version: PolicyVersion) -> None:
        self._require_members()
        self._transfers += 1
        self._deltas = False
        folder = self._epoch_folder / f"{self._transfers:06d}-version-{version}"
        try:
            folder.mkdir()
        except OSError as error:
            raise self._failure(error, str(folder)) from error
        self._versions.append(folder)
        for old in self._versions[:-KEPT]:
            with suppress(OSError):  # the end of the epoch removes it
                remove_folder(old)
        del self._versions[:-KEPT]

    def await_announcement(self, version: PolicyVersion) -> None:
        self._transfers += 1
        prefix = f"{self._transfers:06d}-"
        give_up = time.monotonic() + timeouts.GLOO_BACKSTOP
        name = self._await(
            self._epoch_folder, lambda name: name.startswith(prefix), give_up, timeouts.FOLDER_POLL, f"version {version}"
        )
        self._versions = [self._epoch_folder / name]

    def set_changed(self, index: int, changed: Positions | None) -> None:
        self._encoder.set_changed(index, changed)

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        self._require_members()
        before, folder = self._writing, self._versions[-1]
        self._writing = in_thread(f"write-bucket-{index}", lambda: self._write(folder, index, buffer, before))
        return Deferred(self._await_written, self._writing)

    def receive(self, index: int, buffer: torch.Tensor, root: int) -> Transfer:
        return Deferred(self._read, index, buffer)

    def abort(self) -> None:
        with self._leaving:
            if self.aborted:
                return
            self.aborted = True
        self._left.set()
        leave(self._epoch_folder, self.rank)

    def _check(self) -> None:
        """Check that the group is not left. Raises RuntimeError."""
        if self.aborted:
            raise RuntimeError("the group was aborted")

    def _await_written(self, written: futures.Future[None], timeout: float) -> None:
        give_up = time.monotonic() + timeout
        while not futures.wait([written], min(timeouts.FOLDER_POLL, timeout)).done:
            self._check()
            if time.monotonic() > give_up:
                raise RuntimeError(f"it was not written within {timeout:.1f} s")
        written.result()

    def _read(self, index: int, buffer: torch.Tensor, timeout: float) -> None:
        """Wait for the file of bucket `index`, then fill `buffer`."""
        path, give_up = self._versions[-1] / self._shard(index), time.monotonic() + timeout
        self._await(path.parent, lambda name: name == path.name, give_up, timeouts.SHARD_POLL, str(path))
        try:
            self._fill(TensorReader(path), index, buffer)
        except (OSError, UserError) as error:
            self._check()
            if not self._epoch_folder.exists():  # removed after the file was seen
                raise RuntimeError(f"{self._label(0)} left the group") from error
            reason = f"{path} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise RuntimeError(reason) from error

    def _fill(self, reader: TensorReader, index: int, buffer: torch.Tensor) -> None:
        # Read instead of map: an access to a mapped page kills the process if the server has removed the file.
        if header := reader.metadata.get("delta"):
            self._fill_delta(reader, index, bytes.fromhex(header), buffer)
            return
        bucket, tensors = self._buckets[index], self._tensors(index, buffer)
        trailer = reader.metadata.get("trailer", "")
        stored = {name: (spec.dtype, spec.shape) for name, spec in reader.specs.items()}
        wanted = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}
        if stored != wanted or not _TRAILER.fullmatch(trailer):
            raise RuntimeError(f"{reader.path} does not hold bucket {index} of the manifest")
        for name, tensor in tensors.items():
            self._check()
            reader.read_into(name, tensor)
        clear(bucket, buffer)
        buffer[bucket.data_bytes :] = torch.frombuffer(bytearray.fromhex(trailer), dtype=torch.uint8)
        if self._encodes:
            self._decoder.keep(index, buffer)

    def _fill_delta(self, reader: TensorReader, index: int, header: bytes, buffer: torch.Tensor) -> None:
        nbytes = self._decoder.require(index, header)
        if reader.specs != {_DELTA: (spec := TensorSpec(_DELTA, "uint8", (nbytes,)))}:
            raise RuntimeError(f"{reader.path} does not hold the delta of bucket {index}")
        self._decoder.apply(index, header, reader.rows(spec, 0, nbytes).numpy(), buffer)

    def _write(self, folder: Path, index: int, buffer: torch.Tensor, before: futures.Future[None] | None) -> None:
        """Write the file of a bucket, in a thread. Waits for the file `before`, so that the index is the last file."""
        if before is not None:
            before.result()
        path = folder / self._shard(index)
        specs, tensors, metadata = self._contents(index, buffer)
        metadata["version"] = folder.name.rpartition("-")[2]
        partial = path.with_name(f".{path.name}.partial")
        try:
            with TensorWriter(partial, specs, metadata) as writer:
                for name, tensor in tensors.items():
                    self._check()
                    writer.write(name, tensor)
            self.sent_bytes += partial.stat().st_size
            partial.rename(path)
            if index + 1 == len(self._buckets) and not self._deltas:
                self._write_index(folder)
        except OSError as error:
            raise self._failure(error, f"{folder}: bucket {index} of {len(self._buckets)}") from error

    def _contents(self, index: int, buffer: torch.Tensor) -> tuple[list[TensorSpec], dict[str, torch.Tensor], dict[str, str]]:
        """Return the contents of a bucket's file: the tensors or a delta, and the metadata."""
        assert self._manifest is not None
        if self._encodes:
            header, changes = self._encoder.encode(index, buffer)
            if changes is not None:
                self._deltas = True
                return (
                    [TensorSpec(_DELTA, "uint8", changes.shape)],
                    {_DELTA: torch.from_numpy(changes)},
                    {"delta": header.hex()},
                )
        bucket = self._buckets[index]
        specs = [self._manifest.tensors[entry.tensor] for entry in bucket.entries]
        trailer = buffer[bucket.data_bytes :].numpy().tobytes().hex()
        return specs, self._tensors(index, buffer), {"trailer": trailer}

    def _write_index(self, folder: Path) -> None:
        assert self._manifest is not None
        tensors = self._manifest.tensors
        files = {
            tensors[entry.tensor].name: self._shard(index)
            for index, bucket in enumerate(self._buckets)
            for entry in bucket.entries
        }
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in tensors)}, "weight_map": files}
        partial = folder / f".{INDEX}.partial"
        partial.write_text(json.dumps(index, indent=2), encoding="utf-8")
        partial.rename(folder / INDEX)

    def _failure(self, error: OSError, what: str) -> Exception:
        """Return the error for a failed write: UserError for a user's mistake, else RuntimeError, also after an abort."""
        if self.aborted:
            return RuntimeError("the group was aborted")
        line = f"{what} cannot be written: {error.strerror}"
        return UserError(f"publication.folder: {line}") if error.errno in _USERS else RuntimeError(line)

    def _tensors(self, index: int, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the bucket's tensors, in its order, as views into `buffer`."""
        assert self._manifest is not None
        found = tensors_in(self._manifest, self._buckets[index], buffer)
        return {self._manifest.tensors[tensor].name: view for tensor, view in found.items()}

    def _shard(self, index: int) -> str:
        return f"model-{index + 1:05d}-of-{len(self._buckets):05d}.safetensors"

    def _require_members(self) -> None:
        """Check that all members are still in the group. Raises RuntimeError."""
        self._check()
        try:
            missing = _missing(names(self._epoch_folder), self.world_size)
        except OSError as error:
            raise self._failure(error, str(self._epoch_folder)) from error
        if missing:
            raise RuntimeError(f"{', '.join(map(self._label, missing))} left the group")

    def _await(self, folder: Path, wanted: Callable[[str], bool], give_up: float, every: float, what: str) -> str:
        """Poll `folder` for a name that `wanted` accepts, and return the name. Raises RuntimeError."""
        while True:
            self._check()
            try:
                found = next(filter(wanted, names(folder)), None)
            except FileNotFoundError:
                raise RuntimeError(f"{self._label(0)} left the group") from None
            except OSError as error:
                raise RuntimeError(f"{folder} cannot be read: {error.strerror}") from error
            if found is not None:
                return found
            if time.monotonic() > give_up:
                raise RuntimeError(f"{what} did not appear")
            self._left.wait(every)


class PendingFilesGroup(PendingGroup):
    """A rendezvous in a shared folder. If dropped without `abort`, the folder stays for the next host to remove."""

    def __init__(self, address: GroupAddress, name: str):
        self.address = address
        self._name = name
        self._folder = epoch_folder(Path(address.folder), address.epoch)
        self._left = threading.Event()

    def connect(self) -> WeightGroup:
        address = self.address
        give_up = time.monotonic() + address.timeout
        try:
            if address.rank:
                self._enter(give_up)
            self._await_members(give_up)
        except BaseException:
            leave(self._folder, address.rank)
            raise
        return FilesGroup(address, self._name, self._folder)

    def abort(self) -> None:
        self._left.set()
        leave(self._folder, self.address.rank)

    def _enter(self, give_up: float) -> None:
        address = self.address
        while MARKER not in self._names():
            if time.monotonic() > give_up:
                self._fail(
                    f"{self._folder}, which {address.label(0)} made on {address.host}, is not seen here: "
                    "publication.folder must be one folder that all these machines share"
                )
            self._pause()
        try:
            (self._folder / f"member-{address.rank}").touch()
        except OSError as error:
            message = f"publication.folder: {self._folder} cannot be written by {self._name}: {error.strerror}"
            raise UserError(message) from error

    def _await_members(self, give_up: float) -> None:
        never_came = set(range(1, self.address.world_size))
        while True:
            present = self._names()
            if MARKER not in present:
                self._fail(f"{self.address.label(0)} is gone")
            missing = _missing(present, self.address.world_size)
            if not missing:
                return
            never_came &= set(missing)
            if time.monotonic() > give_up:
                absent = sorted(never_came) or missing  # `missing` also has members that timed out a moment before
                self._fail(f"{', '.join(map(self.address.label, absent))} did not join")
            self._pause()

    def _names(self) -> list[str]:
        try:
            return names(self._folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"publication.folder: {self._folder} cannot be read by {self._name}: {error.strerror}") from error

    def _pause(self) -> None:
        if self._left.wait(timeouts.FOLDER_POLL):
            self._fail("the rendezvous was given up")

    def _fail(self, message: str) -> None:
        raise ServiceFault(self._name, "rendezvous", message, self.address.timeout)


def _missing(present: Sequence[str], world_size: int) -> list[int]:
    return [rank for rank in range(1, world_size) if f"member-{rank}" not in present]


def leave(folder: Path, rank: int) -> None:
    """Remove the file of `rank` from the epoch's folder; at rank 0 remove the folder."""

    def remove() -> None:
        if rank:
            (folder / f"member-{rank}").unlink()
        else:
            remove_folder(folder)

    # A file server that does not answer must not block the caller. The folder may be removed already, or unreachable.
    with suppress(futures.TimeoutError, OSError):
        in_thread("remove-weights", remove).result(timeouts.FOLDER_REMOVAL)


def host(address: GroupAddress, name: str) -> PendingGroup:
    """Host the rendezvous in the address's folder, as `rendezvous.host` does. Removes the folders of earlier hosts."""
    if not address.folder:
        raise UserError("publication.folder: '' is no folder; transport files needs a folder that all machines share")
    root = Path(address.folder).absolute()
    open_epoch(root, address.epoch)
    return PendingFilesGroup(structs.replace(address, host=socket.gethostname(), folder=str(root)), name)
