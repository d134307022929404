"""The status of a process, and of the run."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from runtime.types import PolicyVersion

State = Literal["starting", "ready", "asleep", "torn", "draining", "failed"]
RunPhase = Literal["starting", "evaluating", "training", "recovering", "saving", "finished", "failed"]


class CallStats(Struct, kw_only=True):
    """A process's calls since its start: `open` ones, and results. `seconds`: from call to answer, a mean over recent calls."""

    open: int = 0
    answered: int = 0
    failed: int = 0
    withdrawn: int = 0
    seconds: float = 0.0


class Status(Struct, kw_only=True):
    """The status of one process. `rates` are per second over the last seconds. `metrics`: Prometheus' HOST:PORT, or ""."""

    role: str
    name: str
    state: str = "starting"
    detail: str = ""
    version: PolicyVersion = PolicyVersion()
    calls: CallStats = field(default_factory=CallStats)
    rates: dict[str, float] = {}
    gauges: dict[str, float] = {}
    pid: int = 0
    address: str = ""
    uptime_seconds: float = 0.0
    metrics: str = ""


class Registration(Struct, kw_only=True):
    """The registration of a process with the coordinator. `seconds` are its start-up times by phase, `incarnation` counts the
    earlier starts under its name. `machine` is `os_process.machine()`. `metrics`: see `Status`."""

    role: str
    name: str
    rank: int = 0
    address: str
    pid: int
    host: str
    seconds: dict[str, float] = {}
    incarnation: int = 0
    machine: str = ""
    metrics: str = ""


class Loss(Struct, kw_only=True, frozen=True):
    """A process that the run goes on without. Its starter ends it, and may start a replacement."""

    name: str
    incarnation: int = 0
    reason: str = ""


class Progress(Struct, kw_only=True):
    """The progress of the run: `step` of `steps`, and `done` of `total` within the phase (0 = not known).

    `phase`: starting, evaluating, training, recovering, saving, finished or failed. `lost`: the newest loss of each name, until
    its replacement has come. `alarm`: the newest rollout that may have other weights than the trainer.
    `stopping`: the run was asked to end, and ends in order."""

    phase: str = "starting"
    step: int = 0
    steps: int = 0
    done: int = 0
    total: int = 0
    detail: str = ""
    lost: list[Loss] = []
    alarm: str = ""
    stopping: bool = False


class RunFigures(Struct, kw_only=True):
    """The current state of the run at the coordinator. `staleness`: the bound, in versions. `rollouts` and `groups` are counted
    by state, lost units and later incarnations (`restarts`) by role. `newest`: the metrics of the newest step and evaluation.
    `stepped`: the end of that step, in seconds since the epoch, 0 before the first. `alarms`: probes over `mismatch.limit`."""

    progress: Progress
    processes: list[Registration]
    staleness: int
    folder: str
    rollouts: dict[str, int]
    lost: dict[str, int]
    restarts: dict[str, int]
    groups: dict[str, int] = {}
    newest: dict[str, float | dict[int, int]] = {}
    stepped: float = 0.0
    alarms: int = 0


class Topology(Struct, kw_only=True):
    """Every registered process."""

    processes: list[Registration] = []


class Stop(Struct, kw_only=True):
    """Ask a process to end, letting it finish for `drain_seconds`."""

    drain_seconds: float = 0.0
    term: int = 0  # of the coordinator that asks, 0 for other callers: a process refuses a lower term than it has seen


class Profile(Struct, kw_only=True):
    """Ask a process to profile its work: a trainer or a critic for the next `steps` steps, any other for `seconds`. `step`: the
    run's current step. `memory`: also record CUDA's allocator."""

    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    memory: bool = False


class Profiled(Struct, kw_only=True):
    """The written files on the process's machine; for an NPU a folder."""

    files: list[str] = []
