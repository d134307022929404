"""Find a rule by its name in the configuration: a built-in rule, or `FILE.py:NAME` for a user's rule."""

from __future__ import annotations

from runtime.rewards import code  # noqa: F401 - importing it registers the rules that run programs
from runtime.rewards.rules import RULES, RewardRule


def find_rule(name: str, key: str = "") -> RewardRule:
    """Return the rule `name` of the key `key`. Raises UserError for an unknown name, or a file that cannot be imported."""
    return RULES.find(name, key)
