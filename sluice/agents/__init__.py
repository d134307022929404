"""What an agent of your own is given, and what makes one of what you have already. The standard library alone: this is imported
in the agent's own interpreter, where nothing of Sluice needs to be installed.

Adapters are imported when they are first asked for, and the packages that they need when one is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sluice.agents.episode import DataError, Episode, EpisodeBranch, InfrastructureError, PolicyRefused

if TYPE_CHECKING:
    from sluice.agents.command import CommandAgent
    from sluice.agents.functions import ToolAgent, Toolset
    from sluice.agents.gymnasium_text import GymnasiumText
    from sluice.agents.mcp_tools import McpServer
    from sluice.agents.openenv_client import OpenEnvClient
    from sluice.agents.trl_environment import TrlEnvironment
    from sluice.agents.verifiers_taskset import VerifiersTaskset

_HOMES = {
    "CommandAgent": "command",
    "GymnasiumText": "gymnasium_text",
    "McpServer": "mcp_tools",
    "OpenEnvClient": "openenv_client",
    "ToolAgent": "functions",
    "Toolset": "functions",
    "TrlEnvironment": "trl_environment",
    "VerifiersTaskset": "verifiers_taskset",
}

__all__ = [
    "CommandAgent",
    "DataError",
    "Episode",
    "EpisodeBranch",
    "GymnasiumText",
    "InfrastructureError",
    "McpServer",
    "OpenEnvClient",
    "PolicyRefused",
    "ToolAgent",
    "Toolset",
    "TrlEnvironment",
    "VerifiersTaskset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sluice.agents' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sluice.agents.{_HOMES[name]}"), name)
