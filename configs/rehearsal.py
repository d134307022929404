"""A reward for rehearsals with a random model, which solves nothing: with a rule that judges answers all its rewards are alike,
advantages are 0, and dynamic sampling drops every group. Name it on the command line:

    rewards.rules=[{name: configs/rehearsal.py:letters}]
"""

from sluice import RuleContext, rule


@rule("letters")
def letters(text: str, label: str, context: RuleContext) -> float:
    """The share of the reply's characters that are ASCII letters."""
    return sum(character.isascii() and character.isalpha() for character in text) / max(1, len(text))
