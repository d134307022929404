"""Finding a rule by the name in the configuration: a built-in one, or `FILE.py:NAME` for a user's own."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from runtime.errors import UserError
from runtime.rewards import accuracy, format  # noqa: F401 - importing them registers the built-in rules
from runtime.rewards.rules import RULES, RewardRule


def find_rule(name: str) -> RewardRule:
    """The rule `name`. Raises UserError for an unknown name, and for a file that is missing or cannot be imported."""
    file, mark, own = name.rpartition(".py:")
    if not mark:
        return RULES.get(name)
    _import(str(Path(f"{file}.py").resolve()))
    return RULES.get(own)


@cache
def _import(path: str) -> None:
    """Execute the file once per process; its decorators register its rules."""
    if not Path(path).is_file():
        raise UserError(f"rewards.rules: {path} is not a file")
    spec = importlib.util.spec_from_file_location(f"sluice_rules_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None, path
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"rewards.rules: {path} cannot be imported: {type(error).__name__}: {error}") from error
