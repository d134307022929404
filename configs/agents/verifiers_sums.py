"""Plays the episodes of configs/agent_verifiers.yaml: a taskset of verifiers', the file beside this one."""

from verifiers_taskset import VerifiersTaskset

agent = VerifiersTaskset("sums_taskset", taskset={"smallest": 10, "largest": 49}, agent={"max_turns": 1})
