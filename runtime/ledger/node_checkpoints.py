"""The checkpoints of nodes that share no folder. Each node has a part, `RUN/parts/NODE/ROLE/checkpoints/step-00000050`,
complete or absent as any checkpoint's folder. Its ranks answer once the part is safe. The coordinator's folder names all parts
and comes last; only this folder makes the checkpoint count. A part of an unfinished checkpoint is removed at the next save, or
set aside when the run goes back.
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
    """Return the folder on a node whose `checkpoints` has the parts of `role`."""
    return run_dir / run_files.PARTS / node / role


def identity(position: Position) -> str:
    """Return an id that no other checkpoint of any run has."""
    return f"{position.run}/{position.version}"


def lineage(config: Config) -> str:
    """Return `Position.run` for the run's checkpoints: that of the checkpoint to resume, else of its own, else a new one."""
    run_dir = Path(config.run.dir)
    own = [checkpoint.folder_for(run_dir, step) for step in checkpoint.steps(run_dir)]
    for folder in (Path(config.run.resume or "never"), *own):
        with suppress(UserError):
            if found := checkpoint.read_position(folder).run:
                return found
    return run_files.run_id(run_dir)


def missing(part: str) -> str:
    """Describe the missing part `ROLE/NODE`."""
    role, _, node = part.partition("/")
    return f"node {node} has no complete part of the {role}, or is not in this run"


def whole(run_dir: Path, node: str, sums: bool = True) -> list[str]:
    """List the checkpoints whose part on this node is complete: `ROLE/NODE/RUN/VERSION`. `sums`: as of `checkpoint.fault`."""
    roots = [root(run_dir, node, role) for role in ("trainer", "critic")]
    folders = [(where.name, checkpoint.folder_for(where, step)) for where in roots for step in checkpoint.steps(where)]
    found = [(role, one) for role, one in folders if not checkpoint.fault(one, sums)]
    return [f"{role}/{node}/{identity(checkpoint.read_position(one))}" for role, one in found]


def begin(parts: Path, step: int, keep: Container[int]) -> Path:
    """Begin a part as `checkpoint.begin` does, and remove the parts of steps not in `keep`."""
    checkpoint.sweep(parts)
    for former in checkpoint.steps(parts):
        if former not in keep:
            checkpoint.discard(checkpoint.folder_for(parts, former))
    return checkpoint.begin(checkpoint.folder_for(parts, step))


def files(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of a role's files, by path in its folder."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return {name: size for name, size in found.items() if name != checkpoint.POSITION}
