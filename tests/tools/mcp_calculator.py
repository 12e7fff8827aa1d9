"""An MCP server for tests: `python -m tests.tools.mcp_calculator`."""

import os

from mcp.server import MCPServer

from testbed.waiting import let_pass

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("out of paper")


@server.tool()
def sleep(seconds: float) -> str:
    """Answer late."""
    let_pass(seconds)
    return "late"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def flood(count: int) -> str:
    """Returns a long text."""
    return "x" * count


if __name__ == "__main__":
    server.run()
