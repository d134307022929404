"""The coordinator's part of a checkpoint: where the run is, beside the weights that it has got to."""

from __future__ import annotations

from msgspec import Struct

from runtime.data.prompts import StreamState
from runtime.types import PolicyVersion


class Position(Struct, kw_only=True):
    """`version` is that of the saved weights: the next step is `version.step`. `trained` are inclusive ranges of group ids,
    `pending` the problems of the groups that were on their way. `files` are the other files in this folder: bytes by path.
    `sums` are their xxh3-128 as hexadecimal digits, and `own_sum` is that of the position itself. `run` names the run through
    all its starts. `parts`: where nodes share no folder, who has the checkpoint: `ROLE/NODE`."""

    version: PolicyVersion
    stream: StreamState
    trained: list[tuple[int, int]]
    pending: list[int] = []
    accuracy: float | None = None  # the newest evaluation's
    best_accuracy: float | None = None
    best_step: int | None = None  # the checkpoint that had it
    files: dict[str, int] = {}  # put in as the checkpoint is completed; version 0.1.0 named none
    sums: dict[str, str] = {}  # as these are; before version 0.3 there were none
    own_sum: str = ""
    run: str = ""
    parts: list[str] = []
