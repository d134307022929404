"""Plays the episodes of configs/agent_gymnasium.yaml: Gymnasium's Blackjack, in text."""

from gymnasium_text import GymnasiumText


class Blackjack(GymnasiumText):
    def text(self, observation, environment):
        own, dealer, _ = observation
        return f"{own}+{dealer}="  # what the tiny model of the example has learned to read

    def action(self, reply):
        """1: another card; 0: no more."""
        return int("1" in reply)


agent = Blackjack("Blackjack-v1", turns=8)
