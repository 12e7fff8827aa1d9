"""The task `tools`: a data set's prompts, and tools of an MCP server (docs/reference/tasks.md).
Tools run in the reward process, under its environment; the calls of a turn share one deadline. A
failed call is a result: the model may try again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollstream.deadline import Deadline
from rollstream.errors import ConfigurationError
from rollstream.import_path import nearest
from rollstream.producers.dialogue.template_messages import ToolSchema
from rollstream.producers.dialogue.tool_formats import (
    TOOL_FORMATS,
    UNKNOWN,
    format_of_template,
    unknown_format,
)
from rollstream.producers.tasks.base import Reply, Turns
from rollstream.producers.tasks.dataset import Dataset, DatasetOptions
from rollstream.producers.tasks.text import TaskText
from rollstream.producers.tasks.tool_calls import (
    ParsedAnswer,
    ToolCall,
    parse_tool_calls,
)
from rollstream.producers.tasks.tool_server import ToolServer, ToolServerFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialogueOptions(DatasetOptions):
    """`task.options` of `dataset`, and an MCP server's command line or URL, the format of calls
    ("": the chat template's), the model's most turns, and the seconds of the calls of one turn.
    """

    server: list[str] | str
    calls: str = ""
    turns_max: int = 8
    calls_s: float = 5.0


class ToolDialogue(Dataset):
    """Implements `Task` and `Environment` over a data set and one tool server for each process."""

    name = "tools"
    Options = ToolDialogueOptions

    def __init__(self, text: TaskText, options: ToolDialogueOptions) -> None:
        super().__init__(text, options)
        if options.calls and options.calls not in TOOL_FORMATS:
            hint = nearest(options.calls, TOOL_FORMATS) or f"; there are {', '.join(TOOL_FORMATS)}"
            raise ConfigurationError(f"{self._where} of tools: no format {options.calls!r}{hint}")
        if options.turns_max < 1 or options.calls_s <= 0:
            raise ConfigurationError(
                f"{self._where} of tools: turns_max and calls_s must be above 0"
            )
        self._options, self._server = options, ToolServer(options.server, text.environment)

    def prepare(self) -> None:
        """Starts the server and lists its tools; finds the format of calls."""
        assert self._listed is not None
        assert self._format

    def check_template(self) -> None:
        """Raises `ConfigurationError` if the chat template leaves out the tools, cannot continue a
        dialogue behind a call, or writes calls in an unknown format.
        """
        where = self._text.tokenizer.where
        assert self._format
        if self._listed and self._text.prompt("?", self._listed) == self._text.prompt("?"):
            raise ConfigurationError(
                f"the chat template of {where} does not show the tools of the prompt; choose a "
                "model whose template takes tools"
            )
        function = {"name": "a_tool", "arguments": dict[str, object]()}
        call = {"id": "call-1", "type": "function", "function": function}
        content = {"role": "tool", "tool_call_id": "call-1", "name": "a_tool", "content": "done"}
        self._text.reply([content], self._listed, [call])

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Returns the results of the last turn's calls; no tokens, which end the dialogue, for a
        turn without calls and for the last allowed turn.
        """
        parsed = parse_tool_calls(self._text.written(turns), self._format, self._listed)
        count = (len(turns) + 1) // 2  # the model's turns and replies alternate
        if not (parsed.tool_calls or parsed.malformed) or count >= self._options.turns_max:
            return Reply(())
        results, calls = self._results(parsed), [_as_message(call) for call in parsed.tool_calls]
        try:
            return Reply(self._text.reply(results, self._listed, calls, turns))
        except ConfigurationError:
            if not parsed.malformed:
                raise
        # Some templates refuse a result without a call: a user's message states the fault.
        results = [
            each if each["name"] else {"role": "user", "content": each["content"]}
            for each in results
        ]
        return Reply(self._text.reply(results, self._listed, calls, turns))

    def _tools(self) -> Sequence[ToolSchema]:
        return self._listed

    @cached_property
    def _listed(self) -> Sequence[ToolSchema]:
        try:
            return self._server.tools()
        except ToolServerFailed as error:
            raise ConfigurationError(
                f"{self._where} of tools: server = {self._options.server}: {error}"
            ) from error

    @cached_property
    def _format(self) -> str:
        if self._options.calls:
            return self._options.calls
        tool_format = format_of_template("\n".join(self._text.chat.sources))
        if tool_format == UNKNOWN:
            reason = unknown_format(self._text.tokenizer.where)
            raise ConfigurationError(f"{self._where} of tools: {reason}; name one as calls")
        return tool_format

    def _results(self, parsed: ParsedAnswer) -> list[dict[str, Any]]:
        deadline = Deadline(self._options.calls_s)
        results = [_message(call, self._result(call, deadline)) for call in parsed.tool_calls]
        for reason in parsed.malformed:
            results.append({"role": "tool", "name": "", "content": f"error: {reason}"})
        return results

    def _result(self, call: ToolCall, deadline: Deadline) -> str:
        if not any(tool["function"]["name"] == call.name for tool in self._listed):
            return f"error: there is no tool {call.name}"
        try:
            return self._server.call(call.name, json.loads(call.arguments), deadline)
        except ToolServerFailed as error:
            return f"error: {error}"


def _message(call: ToolCall, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def _as_message(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
