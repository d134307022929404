"""The registered names that a configuration may use, without importing torch."""

from __future__ import annotations


def known_names() -> dict[str, list[str]]:
    """For `config_checks.semantic_faults`."""
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
