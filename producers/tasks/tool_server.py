"""Each request has a deadline, each result a bound; a server that ends or does not answer is
started again at the next request. A result, or an error, is text: nothing of it is executed.
"""

import asyncio
import os
import shlex
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rollstream.deadline import Deadline
from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.producers.dialogue.template_messages import ToolSchema
from rollstream.producers.tasks import tool_command
from rollstream.producers.tasks.code_environment import allowed_variables, of_a_program
from rollstream.program_output import OutputPipe

if TYPE_CHECKING:
    from mcp import Client

START_S = 300.0  # until the server has listed its tools, on a busy machine
STOP_S = 10.0
TOOLS_MAX = 512
RESULT_MAX = 16_384  # characters of one result
_CLOSED = -32000  # the code of the protocol's library for a server that has ended
_PAGES_MAX = 64  # of a server's list of tools
Answer = TypeVar("Answer")


class ToolServerFailed(RollstreamError, OSError):
    """It ended, or did not answer before the deadline; the next request starts it again."""


class ToolServer:
    """Starts a command line or opens one URL at the first request. It gets the environment of a
    task's code, with the variables that `environment` names.
    """

    def __init__(self, server: Sequence[str], environment: Sequence[str] = ()) -> None:
        self._environment = tuple(environment)
        self._server = shlex.split(server) if isinstance(server, str) else list(server)
        if not self._server:
            raise ConfigurationError("task.options.server: give a command line or a URL")
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def tools(self) -> list[ToolSchema]:
        """Returns the server's tools, in its order. Raises `ToolServerFailed`."""
        deadline = Deadline(START_S)

        async def listed(client: "Client") -> list[ToolSchema]:
            schemas: list[ToolSchema] = []
            cursor: str | None = None
            for _ in range(_PAGES_MAX):
                page = await client.list_tools(cursor=cursor)
                schemas += [_schema(tool) for tool in page.tools]
                cursor = page.next_cursor
                if cursor is None or len(schemas) >= TOOLS_MAX:
                    break
            return schemas[:TOOLS_MAX]

        return self._ask(listed, deadline)

    def call(self, name: str, arguments: Mapping[str, object], deadline: Deadline) -> str:
        """Returns the result's text; that of an error begins with `error: `. Raises
        `ToolServerFailed` without a result before the deadline.
        """

        async def called(client: "Client") -> str:
            result = await client.call_tool(name, dict(arguments))
            text = "\n".join(_text(block) for block in result.content)
            return _bounded(f"error: {text}" if result.is_error else text)

        return self._ask(called, deadline)

    def close(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ask(
        self, request: "Callable[[Client], Coroutine[Any, Any, Answer]]", deadline: Deadline
    ) -> Answer:
        try:
            from mcp import MCPError
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                "tools of an MCP server need the extra `mcp`: pip install 'rollstream[mcp]'"
            ) from error
        with self._lock:
            if self._session is None:
                self._session = _Session(self._server, self._environment)
            session = self._session
        try:
            return session.ask(request, deadline)
        except ToolServerFailed:
            raise
        except MCPError as error:
            if error.code != _CLOSED:  # the server refuses this request and lives on
                raise ToolServerFailed(error.message) from error
            self.close()
            raise ToolServerFailed(f"{error.message}{session.last_words()}") from error
        except TimeoutError:
            self.close()
            raise ToolServerFailed("the tool did not answer in time") from None
        except Exception as error:  # a server may end in any way that its library reports
            self.close()
            failed = f"the tool server failed: {_cause(error)}{session.last_words()}"
            raise ToolServerFailed(failed) from error


class _Session:
    def __init__(self, server: Sequence[str], environment: Sequence[str]) -> None:
        self._server = list(server)
        self._variables = of_a_program(allowed_variables(os.environ, environment))
        self._loop = asyncio.new_event_loop()
        self._client: Future[Client] = Future()
        self._stop = asyncio.Event()
        self._printed = OutputPipe(2)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(
        self, request: "Callable[[Client], Coroutine[Any, Any, Answer]]", deadline: Deadline
    ) -> Answer:
        try:
            client = self._client.result(deadline.remaining_s())
        except TimeoutError:
            if self._client.done():
                raise  # an error of the server
            raise ToolServerFailed("the tool server is still starting") from None
        future = asyncio.run_coroutine_threadsafe(request(client), self._loop)
        try:
            return future.result(deadline.remaining_s())
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended with its server
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_S)

    def last_words(self) -> str:
        last = self._printed.output.last
        return f" (it printed last: {last[:200]})" if last else ""

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._hold())
        except BaseException as error:  # noqa: BLE001 (the boundary of a thread)
            if not self._client.done():
                self._client.set_exception(_as_exception(error))
        finally:
            self._printed.close()
            self._loop.close()

    async def _hold(self) -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        first = self._server[0]
        keeper = ["-I", tool_command.__file__, str(os.getpid()), *self._server]
        with open(self._printed.writer, "w", closefd=False) as printed:
            is_url = first.startswith(("http://", "https://"))
            command = StdioServerParameters(
                command=sys.executable, args=keeper, env=self._variables
            )
            async with Client(first if is_url else stdio_client(command, printed)) as client:
                self._client.set_result(client)
                await self._stop.wait()


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _cause(error: BaseException) -> str:
    cause: Any = error
    # Task groups raise groups of errors.
    while isinstance(cause, BaseExceptionGroup):
        cause = cast(Any, cause).exceptions[0]
    return f"{type(cast(object, cause)).__name__}: {cause}"[:500]


def _schema(tool: Any) -> ToolSchema:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _text(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        place = f"[resource {block.resource.uri}]"
        return getattr(block.resource, "text", place)
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    return f"[{block.type}]"


def _bounded(text: str) -> str:
    text = text.encode(errors="replace").decode()
    cut = len(text) - RESULT_MAX
    return text if cut <= 0 else f"{text[:RESULT_MAX]}\n[{cut} more characters]"
