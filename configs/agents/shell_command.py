"""Plays the episodes of configs/agent_shell.yaml: a shell script, and nothing else."""

from pathlib import Path

from sluice.agents import CommandAgent

agent = CommandAgent("sh", str(Path(__file__).with_name("ask.sh")), "{question}", "{answer}")
