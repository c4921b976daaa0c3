"""A server of the package `mcp`: over standard input and output, or at a port that is named."""

import os
import sys
from pathlib import Path

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools", log_level="ERROR")
counts: dict[str, int] = {}


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count(context: Context) -> int:
    """The calls of this session so far."""
    session = (context.headers or {}).get("mcp-session-id", "")
    counts[session] = counts.get(session, 0) + 1
    return counts[session]


@server.tool()
def repeat(text: str, times: int) -> str:
    """A text many times."""
    return text * times


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await anyio.sleep(seconds)
    return "slept"


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def look(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
