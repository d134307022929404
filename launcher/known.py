"""The registered names that a configuration may use, without importing torch."""

from __future__ import annotations


def known_names() -> dict[str, list[str]]:
    """For `config_checks.semantic_faults`."""
    from runtime.data import handlers
    from runtime.rewards import catalogue, rules  # noqa: F401 - the catalogue registers the built-in rules

    return {"data.handler": list(handlers.HANDLERS), "rewards.rules": list(rules.RULES)}
