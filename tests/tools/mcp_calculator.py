"""An MCP server for tests: `python -m tests.tools.mcp_calculator`."""

import os

from mcp.server import MCPServer
from mcp_types import EmbeddedResource, ResourceLink, TextResourceContents

from testbed.waiting import let_pass

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def read(name: str) -> EmbeddedResource:
    """Read a file."""
    content = TextResourceContents(uri=f"file:///{name}", text=f"the text of {name}")
    return EmbeddedResource(type="resource", resource=content)


@server.tool()
def find(name: str) -> ResourceLink:
    """Find a file."""
    return ResourceLink(type="resource_link", uri=f"file:///{name}", name=name)


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
