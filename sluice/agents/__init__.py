"""What your own agent is given, and what makes an agent of existing code. The standard library alone: this is imported in the
agent's own interpreter, where Sluice need not be installed.
"""

from __future__ import annotations

from sluice.agents.command import CommandAgent
from sluice.agents.episode import DataError, Episode, EpisodeBranch, InfrastructureError, PolicyRefused
from sluice.agents.functions import ToolAgent, Toolset

__all__ = ["CommandAgent", "DataError", "Episode", "EpisodeBranch"]
__all__ += ["InfrastructureError", "PolicyRefused", "ToolAgent", "Toolset"]
