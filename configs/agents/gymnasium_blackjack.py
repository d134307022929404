"""Plays the episodes of configs/agent_gymnasium.yaml: Gymnasium's Blackjack, in text."""

from sluice.agents import GymnasiumText


def text(observation, environment):
    own, dealer, _ = observation
    return f"{own}+{dealer}="  # what the tiny model of the example has learned to read


def action(reply):
    """1: another card; 0: no more."""
    return int("1" in reply)


agent = GymnasiumText("Blackjack-v1", text=text, action=action, turns=8)
