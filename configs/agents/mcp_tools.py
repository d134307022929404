"""The tools of an MCP server (mcp 2), as an entry of an agent's `tools`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Mapping
from typing import Any

import mcp

from sluice.agents.episode import InfrastructureError

CLOSED = -32000  # MCP's code of a call whose connection has ended


class McpServer:
    """`McpServer("python", "-m", "mcp_server_time")` is started for each episode and ended with it;
    `McpServer("http://HOST/mcp")` runs already, and each episode has a session of its own with it. `python` is the agent's own
    interpreter.

    `only`: the tools that the model is shown; none named: all. `env`: variables of a server that is started, besides PATH, HOME
    and the like. `shared`: all episodes that one process plays have the same server and session.
    """

    def __init__(self, *server: str, only: Collection[str] = (), env: Mapping[str, str] | None = None, shared: bool = False):
        if not server:
            raise ValueError("McpServer: names neither a URL nor a command")
        self._server = server
        self._only, self._env, self._shared = only, env, shared
        self._connection: _McpConnection | None = None

    async def connect(self) -> _McpConnection:
        """Raises InfrastructureError where there is no such server."""
        kept = self._connection
        if kept is not None and not await kept.answers():  # killed since, or its loop has ended
            await kept.leave()
            self._connection = None if self._connection is kept else self._connection
        connection = self._connection or _McpConnection(mcp.Client(self._target()), self._only)
        if self._shared:
            self._connection, connection.kept = connection, True
        try:
            await connection.opened()
        except BaseException:
            await connection.leave()
            raise
        return connection

    def _target(self) -> Any:
        command, *arguments = self._server
        if command.startswith(("http://", "https://")):
            return command
        command = sys.executable if command == "python" else command
        return mcp.StdioServerParameters(command=command, args=arguments, env=self._env)


class _McpConnection:
    """A session, in a task of its own: who enters a session must leave it. `schemas`: of its tools, once it is open. `kept`: it
    stays open while its process does."""

    def __init__(self, client: Any, only: Collection[str]):
        self.kept = False
        self.schemas: list[dict[str, Any]] = []
        self._client, self._only = client, only
        self._ready, self._left = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        async with self._client:
            page = await self._client.list_tools()
            tools = list(page.tools)
            while page.next_cursor:
                page = await self._client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            self.schemas = [schema_of(tool) for tool in tools if not self._only or tool.name in self._only]
            self._ready.set()
            await self._left.wait()

    async def opened(self) -> None:
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            raise InfrastructureError(f"the MCP server did not begin: {innermost(self._task.exception())!r}")

    async def answers(self) -> bool:
        """Whether the server does; also where it has not begun yet."""
        if self._ready.is_set() and not self._task.done():
            try:
                await self._client.list_tools(cache_mode="bypass")
            except mcp.MCPError:
                return False
        return not self._task.done()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The texts of what the tool gave. Raises ValueError for what it refused, InfrastructureError where the server has
        gone."""
        try:
            found = await self._client.call_tool(name, dict(arguments))
        except mcp.MCPError as error:
            if error.code == CLOSED:
                raise InfrastructureError("the MCP server has gone") from None
            raise ValueError(error.message) from None
        text = "\n".join(part.text for part in found.content if part.type == "text")
        if found.is_error:
            raise ValueError(text)
        return text

    async def close(self) -> None:
        """Ends the session, and a server that was started with it, unless it is kept."""
        if not self.kept:
            await self.leave()

    async def leave(self) -> None:
        self._left.set()
        if not self._ready.is_set():
            self._task.cancel()
        await asyncio.wait({self._task})


def schema_of(tool: Any) -> dict[str, Any]:
    """As an entry of a request's `tools`."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": untitled(tool.input_schema)}
    return {"type": "function", "function": function}


def untitled(schema: Any) -> Any:
    """Without the titles that say a name once more, and cost tokens."""
    if isinstance(schema, list):
        return [untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def innermost(error: Any) -> Any:
    """The first of a group of exceptions, at whatever depth."""
    return innermost(error.exceptions[0]) if hasattr(error, "exceptions") else error
