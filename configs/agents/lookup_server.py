"""An MCP server with one tool, on standard input and output: the value of a key, which nobody can guess."""

import asyncio
import zlib

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

LOOKUP = Tool(name="lookup", input_schema={"type": "object", "properties": {"key": {"type": "string"}}})


async def tools(context, params):
    return ListToolsResult(tools=[LOOKUP])


async def call(context, params):
    value = 100 + zlib.crc32(str(params.arguments["key"]).encode()) % 900
    return CallToolResult(content=[TextContent(text=str(value))])


async def main():
    server = Server("lookup", on_list_tools=tools, on_call_tool=call)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
