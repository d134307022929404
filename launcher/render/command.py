"""`sluice render`: the files that start a run's nodes under Slurm, Kubernetes or Docker Compose, and its monitoring files."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from launcher.render import files
from launcher.render.plan import plan
from runtime import run_files
from runtime.config import Config, loading
from runtime.errors import ConfigError, UserError
from runtime.process import keys
from runtime.process.network import own_address


def run(options: argparse.Namespace) -> None:
    for path in render(options):
        print(path)


def render(options: argparse.Namespace) -> list[Path]:
    """Write the files, and return them. Raises UserError."""
    config = loading.resolve(loading.load(options.config, options.overrides))
    if options.target == "prometheus":
        return _write(_watched(config), {}, options.output or Path("rendered") / options.target)
    made = plan(config, options.device, options.devices, getattr(options, "image", ""))
    private: dict[str, str] = {}
    if options.target == "slurm":
        texts = files.slurm(made)
    elif options.target == "kubernetes":
        texts, private = files.kubernetes(made, options.claim), files.secret(made, secrets.token_hex(keys.BYTES))
    else:
        texts = files.compose(made)
    return _write(texts, private, options.output or Path("rendered") / options.target)


def _watched(config: Config) -> dict[str, str]:
    """Render the monitoring of a run that is started by hand. Raises UserError."""
    settings, coordinator = config.metrics.prometheus, config.services.coordinator
    if settings is None or not settings.port:
        raise ConfigError(["metrics.prometheus.port: missing; must be a port at which Prometheus finds the coordinator"])
    return files.monitoring(config, coordinator.host or own_address(config.network.interface))


def _write(texts: dict[str, str], private: dict[str, str], folder: Path) -> list[Path]:
    """Write the files. A file that differs is not overwritten: raises UserError. A `private` file is written only once."""
    paths = {folder / name: text for name, text in texts.items()}
    try:
        for path, text in paths.items():
            if path.exists() and path.read_text() != text:
                raise UserError(f"--output: {path} is there and differs; remove it, or name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text)
        for name, text in private.items():
            if not (folder / name).exists():
                run_files.write_private(folder / name, text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--output: cannot write to {folder}: {error}") from error
    return [*paths, *(folder / name for name in private)]
