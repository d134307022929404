"""`sluice render`: the files that start a run's nodes under Slurm, Kubernetes or Docker Compose."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.render import compose, kubernetes, slurm
from launcher.render.plan import plan
from runtime.config import loading
from runtime.errors import UserError


def render(options: argparse.Namespace) -> list[Path]:
    """Write the files, and return them. Raises UserError."""
    config = loading.resolve(loading.load(options.config, options.overrides))
    made = plan(config, options.device, options.devices, getattr(options, "image", ""))
    if options.target == "slurm":
        files = slurm.render(made)
    elif options.target == "kubernetes":
        files = kubernetes.render(made, options.claim)
    else:
        files = compose.render(made)
    return _write(files, options.output or Path("rendered") / options.target)


def _write(files: dict[str, str], folder: Path) -> list[Path]:
    """What somebody may have changed is not written over."""
    paths = {folder / name: text for name, text in files.items()}
    try:
        for path, text in paths.items():
            if path.exists() and path.read_text() != text:
                raise UserError(f"--output: {path} is there and differs; remove it, or name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--output: cannot write to {folder}: {error}") from error
    return list(paths)
