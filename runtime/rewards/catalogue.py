"""Finding a rule by the name in the configuration: a built-in one, or `FILE.py:NAME` for a user's own."""

from __future__ import annotations

from runtime.rewards import accuracy, code  # noqa: F401 - importing them registers the built-in rules
from runtime.rewards.rules import RULES, RewardRule


def find_rule(name: str, key: str = "") -> RewardRule:
    """The rule `name`, which `key` of the configuration holds.

    Raises UserError for an unknown name, and for a file that is missing or cannot be imported.
    """
    return RULES.find(name, key)
