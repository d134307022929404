"""What your own agent is given, and what makes an agent of existing code. The standard library alone: this is imported in the
agent's own interpreter, where Sluice need not be installed.
"""

from __future__ import annotations

from typing import Any

from sluice.agents.command import CommandAgent
from sluice.agents.episode import DataError, Episode, EpisodeBranch, InfrastructureError, PolicyRefused
from sluice.agents.functions import ToolAgent, Toolset

# Adapters of earlier versions, with the file of the source's configs/agents that has each now.
_MOVED = {
    "GymnasiumText": "gymnasium_text",
    "McpServer": "mcp_tools",
    "OpenEnvClient": "openenv_client",
    "TrlEnvironment": "trl_environment",
    "VerifiersTaskset": "verifiers_taskset",
}

__all__ = [
    "CommandAgent",
    "DataError",
    "Episode",
    "EpisodeBranch",
    "InfrastructureError",
    "PolicyRefused",
    "ToolAgent",
    "Toolset",
]


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        file = f"configs/agents/{_MOVED[name]}.py"
        raise ImportError(f"{name} is no longer part of sluice.agents: copy {file} of Sluice's source beside your file")
    raise AttributeError(f"module 'sluice.agents' has no attribute {name!r}")
