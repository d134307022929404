"""Sandboxes run untrusted programs, isolated and with limits: `run` for one command, `Box` for several in one folder.

::

    this process ── command line of the runtime ──►  keeper (process 1 of the sandbox)  ── fork ──►  a command
          │  Box: commands down a pipe, answers up ──────┘  checks limits, kills, answers                └─ its processes

docs/guides/rewards.md#sandboxes lists what each runtime prevents, and what it does not.
"""

from runtime.config.sandbox import Sandbox
from runtime.sandbox.box import Box, Finished, check, run

__all__ = ["Box", "Finished", "Sandbox", "check", "run"]
