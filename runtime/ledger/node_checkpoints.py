"""The checkpoints of nodes that share no folder. Each has a part, `RUN/parts/NODE/ROLE/checkpoints/step-00000050`, which is
whole or not there at all, as any checkpoint's folder. Its ranks answer once it is safe; the coordinator's folder, which names
all parts, comes last, and it alone counts: a part of a checkpoint that never came to that is removed at the next save, or set
aside as the run goes back.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from runtime import run_files
from runtime.config import Config
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position


def root(run_dir: Path, node: str, role: str) -> Path:
    """In whose folder `checkpoints` a node has the parts of `role`."""
    return run_dir / run_files.PARTS / node / role


def identity(position: Position) -> str:
    """No other checkpoint of any run has it."""
    return f"{position.run}/{position.version}"


def lineage(config: Config) -> str:
    """`Position.run` of the run's checkpoints: of those that it goes on from, or has; else that of its start."""
    run_dir = Path(config.run.dir)
    own = [checkpoint.folder_for(run_dir, step) for step in checkpoint.steps(run_dir)]
    for folder in (Path(config.run.resume or "never"), *own):
        with suppress(UserError):
            if found := checkpoint.read_position(folder).run:
                return found
    return run_files.run_id(run_dir)


def missing(part: str) -> str:
    """That a part `ROLE/NODE` is not there."""
    role, _, node = part.partition("/")
    return f"node {node} has not the {role}'s part of it whole, or takes no part in it"


def whole(run_dir: Path, node: str, sums: bool = True) -> list[str]:
    """Of which checkpoints a node has its part whole: `ROLE/NODE/RUN/VERSION`. `sums`: as of `checkpoint.fault`."""
    places = [root(run_dir, node, role) for role in ("trainer", "critic")]
    folders = [(place.name, checkpoint.folder_for(place, step)) for place in places for step in checkpoint.steps(place)]
    found = [(role, one) for role, one in folders if not checkpoint.fault(one, sums)]
    return [f"{role}/{node}/{identity(checkpoint.read_position(one))}" for role, one in found]


def begin(place: Path, step: int, keep: Container[int]) -> Path:
    """What `checkpoint.begin` makes; parts of steps that are not to be kept are removed."""
    checkpoint.sweep(place)
    for former in checkpoint.steps(place):
        if former not in keep:
            checkpoint.discard(checkpoint.folder_for(place, former))
    return checkpoint.begin(checkpoint.folder_for(place, step))


def files(folder: Path) -> dict[str, int]:
    """Of a role's state: bytes, by their path in its folder."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return {name: size for name, size in found.items() if name != checkpoint.POSITION}
