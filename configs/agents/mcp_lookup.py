"""Plays the episodes of configs/agent_mcp.yaml: a conversation with the tools of an MCP server."""

from pathlib import Path

from mcp_tools import McpServer

from sluice.agents import ToolAgent


def right(data, messages):
    return float(messages[-1]["content"] == data["answer"])


server = McpServer("python", str(Path(__file__).with_name("lookup_server.py")), shared=True)
agent = ToolAgent([server], reward=right, turns=3)
