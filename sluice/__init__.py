"""What a file of yours imports, and how a run is started from Python.

Each name is imported on first use, and nothing here loads torch. Names that are not listed here may change with any version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sluice.start import own_packages

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.algorithms.advantages import GroupSums as GroupSums
    from runtime.algorithms.advantages import whiten as whiten
    from runtime.algorithms.interfaces import AGGREGATIONS as AGGREGATIONS
    from runtime.algorithms.interfaces import CORRECTIONS as CORRECTIONS
    from runtime.algorithms.interfaces import KL_ESTIMATORS as KL_ESTIMATORS
    from runtime.algorithms.interfaces import AdvantageInputs as AdvantageInputs
    from runtime.algorithms.interfaces import AdvantageOptions as AdvantageOptions
    from runtime.algorithms.interfaces import Aggregate as Aggregate
    from runtime.algorithms.interfaces import CorrectionOutputs as CorrectionOutputs
    from runtime.algorithms.interfaces import LossInputs as LossInputs
    from runtime.algorithms.interfaces import LossOptions as LossOptions
    from runtime.algorithms.interfaces import LossOutputs as LossOutputs
    from runtime.algorithms.interfaces import advantage as advantage
    from runtime.algorithms.interfaces import policy_loss as policy_loss
    from runtime.config import Config as Config
    from runtime.data.handlers import FieldColumns as FieldColumns
    from runtime.data.handlers import Fields as Fields
    from runtime.data.handlers import Rejected as Rejected
    from runtime.data.handlers import handler as handler
    from runtime.errors import UserError as UserError
    from runtime.rewards.rules import GroupContext as GroupContext
    from runtime.rewards.rules import RuleContext as RuleContext
    from runtime.rewards.rules import group_rule as group_rule
    from runtime.rewards.rules import rule as rule
    from runtime.rewards.rules import up_to as up_to
    from runtime.telemetry.summary import Summary as Summary

_MODULES = {
    "runtime.algorithms.advantages": ("GroupSums", "whiten"),
    "runtime.algorithms.interfaces": (
        *("AGGREGATIONS", "CORRECTIONS", "KL_ESTIMATORS", "AdvantageInputs", "AdvantageOptions", "Aggregate"),
        *("CorrectionOutputs", "LossInputs", "LossOptions", "LossOutputs", "advantage", "policy_loss"),
    ),
    "runtime.config": ("Config",),
    "runtime.data.handlers": ("FieldColumns", "Fields", "Rejected", "handler"),
    "runtime.errors": ("UserError",),
    "runtime.rewards.rules": ("GroupContext", "RuleContext", "group_rule", "rule", "up_to"),
    "runtime.telemetry.summary": ("Summary",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_HOMES, "load_config", "train"])  # type checkers see what is imported above by its own name


def load_config(path: Path | str, *overrides: str) -> Config:
    """Load the configuration of a YAML file, with `overrides` of the form `key.path=value`, as `sluice train` does.

    Raises UserError, with one line for each fault."""
    own_packages()
    from pathlib import Path

    from runtime.config import loading

    return loading.resolve(loading.load(Path(path), overrides))


def train(config: Config | Path | str, *overrides: str) -> Summary:
    """Run the whole topology on this machine to its end, as `sluice train` does. `config`: a YAML file, which `overrides`
    change, or what `load_config` returned.

    Call it in the main thread, where no event loop runs: Ctrl-C and SIGTERM stop the run in order, and it saves. No process is
    left in any case. Raises UserError for a mistake of the user, ServiceFault for a fault of the system, and KeyboardInterrupt
    if the run was stopped at once, or before there was anything to save."""
    import asyncio
    import time

    asked = time.monotonic()  # the program's earlier time is no part of the run's start-up
    own_packages()
    from rich.console import Console

    from launcher.commands.train import train as run
    from launcher.job import Interrupted
    from launcher.view import View
    from runtime.config import Config

    if not isinstance(config, Config):
        config = load_config(config, *overrides)
    elif overrides:
        raise TypeError(f"train: overrides {overrides} change a file, not a Config")
    try:
        with View(Console()) as view:
            return asyncio.run(run(config, view, asked=asked))
    except Interrupted as how:
        raise KeyboardInterrupt(str(how)) from None


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sluice-rl")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own_packages()
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
