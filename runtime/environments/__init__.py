"""Agents of the user: the messages that ask them for an episode, and the processes that play it."""
