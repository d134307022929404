"""What a process says of itself, and what the coordinator says of the run."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from runtime.types import PolicyVersion

State = Literal["starting", "ready", "asleep", "torn", "draining", "failed"]
RunPhase = Literal["starting", "evaluating", "training", "recovering", "saving", "finished", "failed"]


class CallStats(Struct, kw_only=True):
    """A process's calls since its start: those that are `open` now, and how the others ended. `seconds`: from a call to its
    answer, the mean over the recent ones."""

    open: int = 0
    answered: int = 0
    failed: int = 0
    withdrawn: int = 0
    seconds: float = 0.0


class Status(Struct, kw_only=True):
    """One process, now. `rates` are per second over the last seconds. `metrics`: HOST:PORT of what it serves for Prometheus, or
    ""."""

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
    """A process announces itself to the coordinator. `seconds` are its start-up times by phase, `incarnation` counts the
    processes that were started under its name before. `machine` is `os_process.machine()`. `metrics`: as of `Status`."""

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
    """A process that the run does without: whoever started it ends it, and may start another in its place."""

    name: str
    incarnation: int = 0
    reason: str = ""


class Progress(Struct, kw_only=True):
    """Where the run is: `step` of `steps`, and `done` of `total` within the phase (0 = not known).

    `phase`: starting, evaluating, training, recovering, saving, finished or failed. `lost`: the newest loss of each name, until
    another process has come in its place. `alarm`: the newest rollout that may have other weights than the trainer.
    `stopping`: the run was told to end, and does so in order.
    """

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
    """The run at the coordinator, now. `staleness`: the bound, in versions. `rollouts` and `groups` are counted by state; units
    that are lost, and incarnations beyond the first (`restarts`), by role. `newest`: the metrics of the newest step and of the
    newest evaluation; `stepped`: when that step ended, in seconds since the epoch, 0 before the first. `alarms`: probes over
    `mismatch.limit`."""

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
    """Every process that registered."""

    processes: list[Registration] = []


class Stop(Struct, kw_only=True):
    """Ask a process to end, letting it finish for `drain_seconds`."""

    drain_seconds: float = 0.0
    term: int = 0  # of the coordinator that asks, 0 for anybody else: a process that has heard a higher one does not heed it


class Profile(Struct, kw_only=True):
    """Ask a process to record what it does while it goes on: a trainer or a critic for `steps` after the one that is under way,
    any other for `seconds`. `step`: of the run, now. `memory`: what CUDA's allocator did as well."""

    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    memory: bool = False


class Profiled(Struct, kw_only=True):
    """What was written, on the machine of the process: files, or of an NPU a folder."""

    files: list[str] = []
