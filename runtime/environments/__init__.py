"""Agents of the user's: how they are asked for an episode, and the processes that play it."""
