"""The registered names that a configuration may use, and those of the user's own files, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.config import Config
    from runtime.registry import Registry


def _registries() -> dict[str, Registry[Any]]:
    """Return the registries with their built-in entries, by the key that names an entry."""
    from runtime import algorithms  # noqa: F401 - importing it registers what it has
    from runtime.algorithms import interfaces
    from runtime.data import handlers
    from runtime.rewards import code, rules  # noqa: F401 - importing code registers the rules that run programs

    return {
        "algorithm.advantage": interfaces.ADVANTAGES,
        "algorithm.loss": interfaces.POLICY_LOSSES,
        "algorithm.correction": interfaces.CORRECTIONS,
        "algorithm.aggregation": interfaces.AGGREGATIONS,
        "algorithm.kl": interfaces.KL_ESTIMATORS,
        "data.handler": handlers.HANDLERS,
        "rewards.rules": rules.RULES,
    }


def known_names() -> dict[str, list[str]]:
    """Return the registered names by key, for `runtime.config.checks.semantic_faults`."""
    registries = _registries()
    found = {key: list(registry) for key, registry in registries.items()}
    found["algorithm.correction"].append("none")
    advantages = registries["algorithm.advantage"]
    return found | {"critic": [name for name in advantages if advantages.find(name).needs_values]}


def faults_of_own_files(config: Config) -> Iterator[str]:
    """Yield why functions that are named FILE.py:NAME cannot be found, or not called with their options. Imports their files,
    as the processes would that call them. Files for another interpreter are left to that interpreter."""
    from runtime.chosen_algorithm import choose
    from runtime.config.checks import chosen_names
    from runtime.errors import UserError
    from runtime.registry import OWN

    registries, services, found = _registries(), config.services, True
    for key, name, kind in chosen_names(config):
        python = services.reward.python if kind == "rewards.rules" else services.coordinator.python
        if OWN in name and not python:
            try:
                registries[kind].find(name, key)
            except UserError as error:
                found = False
                yield str(error)
    if found and not services.coordinator.python:
        try:
            choose(config)
        except UserError as error:
            yield str(error)
