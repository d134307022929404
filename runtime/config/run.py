"""A run's folder, its end, its checkpoints, logs and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from runtime.config.base import (
    Bytes,
    Fraction,
    FromEnvironment,
    HoursOr0,
    NonNegative,
    Port,
    Positive,
    Section,
    StepsOr0,
    in_unit,
)


class Run(Section, frozen=True):
    """The folder of a run, and whether the run continues an earlier one."""

    name: str
    """Name of the run; a plain folder name."""
    dir: str = ""
    """The folder with all that the run writes. Empty: `runs/NAME`."""
    seed: NonNegative = 1234
    """Seed of the order of prompts, and of every sample."""
    resume: str = "never"
    """`never`: begin a new run. `auto`: continue from the newest whole checkpoint in `dir`; begin a new run if there is none
    and nothing was trained. Or a checkpoint's folder. A resumed run needs the same `seed`, `data.shuffle`, `data.curriculum`
    and training data."""
    overwrite: bool = False
    """A new run refuses the folder of another run; `true` replaces that run. With `resume: auto` only if there is no checkpoint
    to continue from."""


class StopConditions(Section, frozen=True):
    """What ends a run before `training.steps`; the first condition counts."""

    hours: HoursOr0 = 0.0
    """Hours of training since this start. 0: no limit."""
    accuracy: Fraction = 0.0
    """Stop when an evaluation during training reaches this accuracy (needs `evaluation.every`). 0: never."""


class Checkpoint(Section, frozen=True):
    """Atomic checkpoints. The end of the run always writes one."""

    every: StepsOr0 = 50
    """Steps between two checkpoints. 0: only at the end."""
    keep: Positive = 2
    """Number of newest checkpoints that stay."""
    keep_best: bool = True
    """Keep also the checkpoint with the best evaluation, of the steps that were both evaluated and saved."""
    async_save: bool = False
    """Engine megatron: training continues while the files are written, from a copy in host memory. The next checkpoint, and the
    end of the run, wait for it."""
    gather: bool = False
    """Without `cluster.shared_folder`: the node of rank 0 gets copies of the other nodes' parts, so that a resume does not need
    these nodes. Engine torch saves all on that node anyway."""


class Ledger(Section, frozen=True):
    """The journal of groups, and their payloads. A run continues from it after a crash."""

    retain_bytes: Bytes = 1 << 30
    """Payloads that no restart needs, kept for `sluice samples`. Each checkpoint trims them."""


class Logs(Section, frozen=True):
    """`logs/NAME.log` of each process, with its older files; and `spans/`, the spans of each process."""

    max_bytes: Bytes = 64 << 20
    """Size of a file. Then a new file begins."""
    keep: NonNegative = 3
    """Number of older files that stay for each process. `NAME.log.1` is the newest of them."""
    span_bytes: Annotated[int, in_unit("bytes", ge=0)] = 64 << 20
    """Size of the spans of each process, over all its starts, for `sluice why`, `trace` and `page`. Later spans are dropped and
    counted. 0: no spans."""


class LivePage(Section, frozen=True):
    """`sluice page` of the run during `sluice train`, by the launcher of the coordinator's node."""

    port: Port = 0
    """0: a free port. The console shows the address when the run begins."""
    host: str = "127.0.0.1"
    """The address to listen on, without TLS: from other machines use a tunnel. The console shows it with the required token."""


class Mismatch(Section, frozen=True):
    """The probe: after each weight sync every rollout continues a short prompt, and the trainer computes the same
    log-probabilities. `mismatch/*` is their difference. It shows whether each rollout has the right weights."""

    limit: Annotated[float, in_unit("nats", ge=0)] = 0.2
    """Alarm if the mean difference of one rollout's log-probabilities to the trainer's, over a continuation of 8 tokens, is
    larger. Progress, `sluice status`, summary and the last line show the alarm. 0: never."""
    action: Literal["warn", "stop"] = "warn"
    """After an alarm. `warn`: the run continues. `stop`: the run finishes the step, saves and ends."""


class Prometheus(Section, frozen=True):
    """Every process serves `/metrics` for Prometheus, by HTTP on the address of `network.interface`. `/sd` of the coordinator
    lists all processes, for Prometheus' `http_sd_configs`."""

    port: Port = 0
    """Port of the coordinator. Every other process has a free port, of `network.port_range` if there is one. 0: the coordinator
    too; then a coordinator that takes over has another port."""
    token: FromEnvironment | None = None
    """The variable of the processes' environment with the token of each request, as `authorization: Bearer VALUE`. Null: all
    that reach a process may read its metrics; on other machines only with `network.security: none`."""


class Exposure(Section, frozen=True):
    """How a run's processes expose their metrics."""

    prometheus: Prometheus | None = None
    """Null: no process serves metrics. `{}`: each process serves them, with the defaults below."""


class Tracker(Section, frozen=True):
    """A destination of metrics. Keep `jsonl`: `sluice report` and the table read it."""

    name: Literal["jsonl", "tensorboard", "wandb", "swanlab", "mlflow"]
    """The last three need `pip install 'sluice-rl[wandb]'`, `'sluice-rl[swanlab]'` or `'sluice-rl[mlflow]'`."""
    project: str = "sluice"
    """Project of wandb and swanlab; experiment of mlflow."""
    mode: Literal["online", "offline", "disabled"] = "offline"
    """Mode of wandb, swanlab and mlflow. Offline, mlflow writes `mlflow/` in the run's folder; online, `MLFLOW_TRACKING_URI` is
    its server."""
