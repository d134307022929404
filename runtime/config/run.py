"""Where a run lives, what ends it, what is kept of it and where its metrics go."""

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
    """Where a run lives, and whether it goes on from an earlier one."""

    name: str
    """Names the run; a plain folder name."""
    dir: str = ""
    """The folder in which everything is written. Empty: `runs/NAME`."""
    seed: NonNegative = 1234
    """Of the order of prompts, and of every sample."""
    resume: str = "never"
    """`never`; `auto`: go on from the newest whole checkpoint in `dir`, or begin anew where there is none and nothing was
    trained; or a checkpoint's folder. A resumed run needs the same `seed`, `data.shuffle`, `data.curriculum` and training
    data."""
    overwrite: bool = False
    """A new run refuses a folder that holds another; true replaces that run. With `resume: auto` only where there is no
    checkpoint to go on from."""


class StopConditions(Section, frozen=True):
    """What ends a run besides `training.steps`, whichever comes first."""

    hours: HoursOr0 = 0.0
    """Of training since this start; 0: no limit."""
    accuracy: Fraction = 0.0
    """Stop when an evaluation during training reaches it (needs `evaluation.every`); 0: no such condition."""


class Checkpoint(Section, frozen=True):
    """Atomic checkpoints; one is written at the end always."""

    every: StepsOr0 = 50
    """Steps between two; 0: only at the end."""
    keep: Positive = 2
    """The newest so many stay."""
    keep_best: bool = True
    """And the one with the best evaluation, of those both evaluated and saved."""
    async_save: bool = False
    """Engine megatron: training goes on while the files are written, from a copy in host memory. One checkpoint at a time: the
    next one waits for it, as does the end of the run."""
    gather: bool = False
    """Without `cluster.shared_folder`: the node of rank 0 gets copies of what other nodes save, which are not needed then to go
    on. What engine torch saves is all there anyway."""


class Ledger(Section, frozen=True):
    """The journal of groups, and their payloads, from which a run goes on after a crash."""

    retain_bytes: Bytes = 1 << 30
    """Payloads that no restart needs, kept for `sluice samples`; trimmed at each checkpoint."""


class Logs(Section, frozen=True):
    """`logs/NAME.log` of each process, and older files of it; and `spans/`, what each process did and when."""

    max_bytes: Bytes = 64 << 20
    """Of a file; then a new one is begun."""
    keep: NonNegative = 3
    """So many older files stay for each process: `NAME.log.1` is the newest of them."""
    span_bytes: Annotated[int, in_unit("bytes", ge=0)] = 64 << 20
    """Of each process's files of spans, those of all its starts together, for `sluice why`, `trace` and `page`; what comes
    later is dropped, and counted. 0: none."""


class LivePage(Section, frozen=True):
    """`sluice page` of the run, while `sluice train` goes on, by the launcher of the coordinator's node."""

    port: Port = 0
    """0: one that is free. Where it is told: on the console, as the run begins."""
    host: str = "127.0.0.1"
    """The address that it listens on, without TLS: off this machine take a tunnel. The token that it wants is told with it."""


class Mismatch(Section, frozen=True):
    """After each publication every rollout continues a short prompt, and the trainer computes the same log-probabilities: how
    far the two are apart (`mismatch/*`), and whether each rollout has the weights that it should have."""

    limit: Annotated[float, in_unit("nats", ge=0)] = 0.2
    """An alarm is raised when one rollout's log-probabilities are further from the trainer's, on average over its continuation
    (8 tokens): progress, `sluice status`, summary and the last line say so. 0: never."""
    action: Literal["warn", "stop"] = "warn"
    """After an alarm. `warn`: the run goes on. `stop`: the run finishes the step, saves and ends."""


class Prometheus(Section, frozen=True):
    """Every process serves `/metrics` for Prometheus, by HTTP on the address of `network.interface`. `/sd` of the coordinator
    names all processes, for Prometheus' `http_sd_configs`."""

    port: Port = 0
    """Of the coordinator. Every other process has any free port, of `network.port_range` where there is one. 0: the coordinator
    too; then each coordinator that takes over has another."""
    token: FromEnvironment | None = None
    """The variable of the processes' environment that each request has to carry, as `authorization: Bearer VALUE`. Null:
    whoever reaches a process may read its metrics; off this machine only with `network.security: none`."""


class Exposure(Section, frozen=True):
    """Who may ask a run's processes for their figures."""

    prometheus: Prometheus | None = None
    """Null: no process serves metrics; `{}`: each does, with the defaults below."""


class Tracker(Section, frozen=True):
    """Where metrics go. `sluice report` and the table are made from `jsonl`, so keep it."""

    name: Literal["jsonl", "tensorboard", "wandb", "swanlab", "mlflow"]
    """The last three need `pip install 'sluice-rl[wandb]'`, `'sluice-rl[swanlab]'` or `'sluice-rl[mlflow]'`."""
    project: str = "sluice"
    """Of wandb and swanlab; mlflow's experiment."""
    mode: Literal["online", "offline", "disabled"] = "offline"
    """Of wandb, swanlab and mlflow, which offline writes `mlflow/` in the run's folder; online `MLFLOW_TRACKING_URI` says where
    its server is."""
