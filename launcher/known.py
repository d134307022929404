"""The registered names that a configuration may use, and those of the user's own files, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.config import Config


def known_names() -> dict[str, list[str]]:
    """For `runtime.config.checks.semantic_faults`."""
    from runtime import algorithms  # noqa: F401 - importing it registers what it has
    from runtime.algorithms import interfaces
    from runtime.data import handlers
    from runtime.rewards import catalogue, rules  # noqa: F401 - the catalogue registers the built-in rules

    return {
        "algorithm.advantage": list(interfaces.ADVANTAGES),
        "critic": [name for name in interfaces.ADVANTAGES if interfaces.ADVANTAGES.get(name).needs_values],
        "algorithm.loss": list(interfaces.POLICY_LOSSES),
        "algorithm.correction": ["none", *interfaces.CORRECTIONS],
        "algorithm.aggregation": list(interfaces.AGGREGATIONS),
        "algorithm.kl": list(interfaces.KL_ESTIMATORS),
        "data.handler": list(handlers.HANDLERS),
        "rewards.rules": list(rules.RULES),
    }


def faults_of_own_files(config: Config) -> Iterator[str]:
    """What keeps the functions that are named FILE.py:NAME from being found, and from being called with their options.

    Imports their files, as the processes would that call them; those for another interpreter than this one are left to it.
    """
    from runtime.algorithms import interfaces
    from runtime.chosen_algorithm import choose
    from runtime.data.handlers import HANDLERS
    from runtime.errors import UserError
    from runtime.registry import OWN, Registry
    from runtime.rewards.rules import RULES

    algorithm, services = config.algorithm, config.services
    named: list[tuple[Registry[Any], str, str, str | None]] = [
        (interfaces.ADVANTAGES, "algorithm.advantage", algorithm.advantage, services.coordinator.python),
        (interfaces.POLICY_LOSSES, "algorithm.loss", algorithm.loss, services.coordinator.python),
        (interfaces.CORRECTIONS, "algorithm.correction", algorithm.correction, services.coordinator.python),
        (interfaces.AGGREGATIONS, "algorithm.aggregation", algorithm.aggregation, services.coordinator.python),
        (interfaces.KL_ESTIMATORS, "algorithm.kl", algorithm.kl, services.coordinator.python),
        (HANDLERS, "data.handler", config.data.handler, services.coordinator.python),
    ]
    for index, rule in enumerate(config.rewards.rules):
        named.append((RULES, f"rewards.rules.{index}.name", rule.name, services.reward.python))
    found = True
    for registry, key, name, python in named:
        if OWN in name and not python:
            try:
                registry.find(name, key)
            except UserError as error:
                found = False
                yield str(error)
    if found and not services.coordinator.python:
        try:
            choose(config)
        except UserError as error:
            yield str(error)
