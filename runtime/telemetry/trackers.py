"""Sends metrics to JSON lines, TensorBoard, Weights & Biases, SwanLab and MLflow, in any combination.

Each tracker has its own thread and bounded queue, so a slow tracker delays neither the event loop nor other trackers.
`metrics.jsonl` has every point. On a full disk, points wait until the file can be written. While its queue stays full, `log`
waits up to a deadline, and then raises an error with the tracker's name. Any other tracker may fail: a warning reports the
failure, the tracker is tried again after a while, and the lost points are counted."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import mmap
import os
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import msgspec

from runtime import run_files, timeouts
from runtime.config import Config, Tracker
from runtime.config.secret_values import without_secrets
from runtime.errors import DeadlineExceeded, ServiceFault, UserError
from runtime.process import waiting
from runtime.telemetry.metrics import Histogram, Metrics

# ---- TensorBoard's event files, without TensorBoard: its writers load torch or TensorFlow, which the coordinator avoids
# A file is a sequence of records, little-endian: length (u64), its checksum (u32), a message, its checksum (u32). The messages
# are `Event` of TensorFlow's event.proto, with summary.proto's `simple_value` and `histo`.


_CRC_TABLE = [reduce(lambda crc, _: crc >> 1 ^ (0x82F63B78 if crc & 1 else 0), range(8), value) for value in range(256)]


def masked_crc32c(data: bytes) -> int:
    """Compute CRC-32C (Castagnoli, RFC 3720 appendix B.4), rotated and offset as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile:
    """One new event file under `folder`; TensorBoard reads a folder's files as one run."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self.path = folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = self.path.open("xb")
        self._record(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        """Append one step's metrics, at `seconds` since the epoch, and flush."""
        values = b"".join(_bytes(1, _value(name, value)) for name, value in metrics.items())
        self._record(_double(1, seconds) + _key(2, 0) + _varint(step) + _bytes(5, values))

    def close(self) -> None:
        self._file.close()

    def _record(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (length, event)))
        self._file.flush()


def _value(name: str, value: float | Mapping[int, int]) -> bytes:
    """Encode Summary.Value: tag = 1, and simple_value = 2 or histo = 5."""
    if isinstance(value, Mapping):
        return _bytes(1, name.encode()) + _bytes(5, _histogram(dict(value)))
    return _bytes(1, name.encode()) + _key(2, 5) + struct.pack("<f", value)


def _histogram(counts: Histogram) -> bytes:
    """Encode HistogramProto with a bucket of width 1 around every integer from the least value to the greatest."""
    if not counts:
        return b""
    values = range(min(counts), max(counts) + 1)
    moments = (sum(value**power * count for value, count in counts.items()) for power in range(3))
    scalars = (min(counts), max(counts), *moments)
    fields = b"".join(_double(field, scalar) for field, scalar in enumerate(scalars, start=1))
    return fields + _doubles(6, [value + 0.5 for value in values]) + _doubles(7, [counts.get(value, 0) for value in values])


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _doubles(field: int, values: Sequence[float]) -> bytes:
    return _bytes(field, struct.pack(f"<{len(values)}d", *values))


_MLFLOW_SERVER = "MLFLOW_TRACKING_URI"
_MLFLOW_PARAMS = 100  # maximum in a request
_MLFLOW_VALUE = 500  # maximum characters of a parameter's value
_QUEUE_POINTS = 256


def missing_package(tracker: Tracker) -> str | None:
    """Return the package to install for `tracker`, or None if the tracker can run."""
    needed = tracker.name in ("wandb", "swanlab", "mlflow") and importlib.util.find_spec(tracker.name) is None
    return f"sluice-rl[{tracker.name}]" if needed else None


class Backend(Protocol):
    """One tracker. Made, called and closed in its own thread."""

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        """Log one point, at `seconds` since the epoch."""

    def close(self) -> None: ...


class JsonLines(Backend):
    """One object a point: step, time and metrics; a histogram is an object of counts. Waits until the disk takes a point."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_after_last_line(path)

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        waiting.write(self._file, msgspec.json.encode({"step": step, "time": seconds, **metrics}) + b"\n")

    def close(self) -> None:
        self._file.close()


def _open_after_last_line(path: Path) -> FileIO:
    """Open for appending, without the torn line that a killed process may have left."""
    file = path.open("a+b", buffering=0)
    if file.seek(0, os.SEEK_END):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            whole = content.rfind(b"\n") + 1
        file.truncate(whole)
    return file


class WandB(Backend):
    def __init__(self, run_dir: Path, run_name: str, **options: Any):
        import wandb

        self._wandb = wandb
        self._run = wandb.init(name=run_name, dir=run_dir, settings=wandb.Settings(silent=True, console="off"), **options)

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        point = {name: self._histogram(value) if isinstance(value, dict) else value for name, value in metrics.items()}
        self._run.log(point, step=step)

    def _histogram(self, counts: Histogram) -> Any:
        values = list(range(min(counts, default=0), max(counts, default=0) + 1))
        edges = [value - 0.5 for value in [*values, values[-1] + 1]]
        return self._wandb.Histogram(np_histogram=([counts.get(value, 0) for value in values], edges))

    def close(self) -> None:
        self._run.finish()


class SwanLab(Backend):
    """SwanLab has no histograms: each value becomes its own line, NAME/VALUE."""

    def __init__(self, run_dir: Path, run_name: str, **options: Any):
        import swanlab

        folder = run_dir / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(name=run_name, log_dir=str(folder), **options)

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        self._run.log(_without_histograms(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Backend):
    """An MLflow run, offline in `mlflow/` of the run's folder. Parameters are the configuration. Histograms as with SwanLab."""

    def __init__(self, run_dir: Path, run_name: str, project: str, mode: str, config: Mapping[str, Any]):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # deprecated by MLflow
        from mlflow import MlflowClient, entities

        self._entities = entities
        folder = (run_dir / "mlflow").absolute()
        self._client = MlflowClient(tracking_uri=folder.as_uri() if mode == "offline" else None)
        experiment = self._client.get_experiment_by_name(project)
        id_ = experiment.experiment_id if experiment else self._client.create_experiment(project)
        known = run_dir / run_files.MLFLOW  # continue the same run after a restart, or after a server was away
        if known.is_file():
            self._run = known.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(id_, run_name=run_name).info.run_id
        known.write_text(self._run)
        params = [entities.Param(name, value[:_MLFLOW_VALUE]) for name, value in _leaves(config)]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MLFLOW_PARAMS])

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        point = _without_histograms(metrics).items()
        named = [(re.sub(r"[^\w./ -]", "_", name), value) for name, value in point]  # MLflow's allowed characters
        when = int(1000 * seconds)
        self._client.log_batch(self._run, metrics=[self._entities.Metric(name, value, when, step) for name, value in named])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _without_histograms(metrics: Metrics) -> dict[str, float]:
    point: dict[str, float] = {}
    for name, value in metrics.items():
        point |= {f"{name}/{key}": count for key, count in value.items()} if isinstance(value, dict) else {name: value}
    return point


log = logging.getLogger("sluice")


class _Worker:
    """The thread of one backend. After a failure it drops queued points, so that no caller waits for room in vain. It tries
    again after a while, unless it is `essential`. `dropped` counts the lost points."""

    def __init__(self, tracker: Tracker, folder: Path, config: Config):
        self.name = tracker.name
        self.essential = tracker.name == "jsonl"
        self.dropped = 0
        self._tracker, self._folder, self._config = tracker, folder, config
        self.failure: BaseException | None = None
        self._queue: queue.Queue[tuple[int, float, Metrics] | None] = queue.Queue(_QUEUE_POINTS)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    async def put(self, point: tuple[int, float, Metrics] | None, seconds: float) -> None:
        """Queue a point, None for the end. Raises DeadlineExceeded if an essential tracker had no room for `seconds`."""
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            if point is not None and not self.essential:
                self.dropped += 1
                return
            try:
                await asyncio.to_thread(self._queue.put, point, True, seconds)
            except queue.Full:
                if self.essential:
                    raise DeadlineExceeded(f"tracker {self.name}", "log", f"{_QUEUE_POINTS} points behind", seconds) from None

    async def close(self, seconds: float) -> None:
        """Write out all points within `seconds`."""
        deadline = time.monotonic() + seconds
        await self.put(None, seconds)  # waits for room in the queue; the thread makes room as it writes
        await asyncio.to_thread(self._thread.join, max(0.0, deadline - time.monotonic()))
        self.check()
        if self._thread.is_alive() and self.essential:
            raise DeadlineExceeded(f"tracker {self.name}", "close", f"{self._queue.qsize()} points not written", seconds)
        if self._thread.is_alive() or self.dropped:
            late = self._queue.qsize() if self._thread.is_alive() else 0
            log.warning("tracker %s has %d points less than metrics.jsonl", self.name, self.dropped + late)

    def check(self) -> None:
        """Raise the failure of an essential backend, if any."""
        if self.essential and isinstance(self.failure, OSError):
            where = self.failure.filename or self._folder
            raise UserError(f"tracker {self.name}: {where}: {self.failure.strerror or self.failure}") from self.failure
        if self.essential and self.failure is not None:
            raise ServiceFault(f"tracker {self.name}", "log", f"{self.failure}") from self.failure

    def _run(self) -> None:
        while True:
            try:
                return self._serve()
            except Exception as error:  # noqa: BLE001  third-party code; `check` raises it to the caller
                self.failure, seconds = error, None if self.essential else timeouts.TRACKER_RETRY
                log.warning("tracker %s failed, and loses the next points: %s", self.name, error)
                self.dropped += 1
                if self._is_over_within(seconds):
                    return None

    def _serve(self) -> None:
        backend = _backend(self._tracker, self._folder, self._config)
        try:
            while (point := self._queue.get()) is not None:
                backend.log(*point)
        finally:
            backend.close()

    def _is_over_within(self, seconds: float | None) -> bool:
        """Drop the points in the queue for `seconds`, or without a limit. Return True once the None of `close` arrives."""
        until = None if seconds is None else time.monotonic() + seconds
        with suppress(queue.Empty):
            while True:
                left = None if until is None else max(0.0, until - time.monotonic())
                if self._queue.get(timeout=left) is None:
                    return True
                self.dropped += 1
        return False


class Trackers:
    """All trackers of a run. Raises UserError with the package to install if a tracker's package is missing."""

    def __init__(self, config: Config, run_dir: str | Path):
        for tracker in config.trackers:
            if package := missing_package(tracker):
                raise UserError(f"tracker {tracker.name}: needs a package: pip install '{package}'")
            if (tracker.name, tracker.mode) == ("mlflow", "online") and not os.environ.get(_MLFLOW_SERVER):
                raise UserError(f"tracker mlflow: mode online: {_MLFLOW_SERVER} is not set; must be the server's address")
        folder = Path(run_dir)
        on = [each for each in config.trackers if (each.name, each.mode) != ("mlflow", "disabled")]  # others handle it
        self._workers = [_Worker(tracker, folder, config) for tracker in on]

    async def log(self, step: int, metrics: Metrics, timeout: float = timeouts.TRACKERS) -> None:
        """Queue one point. Returns at once unless a tracker is far behind. `metrics` must not change afterwards. Raises
        UserError if metrics.jsonl could not be written; DeadlineExceeded if it made no room within `timeout` seconds."""
        now = time.time()
        for worker in self._workers:
            worker.check()
            await worker.put((step, now, metrics), timeout)

    @property
    def dropped(self) -> int:
        """Points lost by trackers other than `jsonl`."""
        return sum(worker.dropped for worker in self._workers if not worker.essential)

    async def close(self, timeout: float = timeouts.TRACKERS) -> None:
        """Write out all points, each tracker within `timeout` seconds. Then raises the first failure, if any."""
        outcomes = await asyncio.gather(*(worker.close(timeout) for worker in self._workers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


def _backend(tracker: Tracker, run_dir: Path, config: Config) -> Backend:
    if tracker.name == "jsonl":
        return JsonLines(run_dir / run_files.METRICS)
    if tracker.name == "tensorboard":
        return EventFile(run_dir / run_files.TENSORBOARD)
    made: dict[str, Callable[..., Backend]] = {"wandb": WandB, "swanlab": SwanLab, "mlflow": MLflow}
    shown = without_secrets(config)
    return made[tracker.name](run_dir, config.run.name, project=tracker.project, mode=tracker.mode, config=shown)
