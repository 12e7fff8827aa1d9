"""The task `tools` lets a model call the tools of a real MCP server, a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.deadline import Deadline
from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Environment
from rollstream.producers.tasks.registry import load_task
from rollstream.producers.tasks.tool_dialogue import ToolDialogue
from rollstream.producers.tasks.tool_server import RESULT_MAX, ToolServer, ToolServerFailed
from testbed.waiting import is_alive, wait_for

NEEDS_CALLS = """\
{%- set ns = namespace(called=false) %}{% for m in messages %}
{%- if m.tool_calls %}{% set ns.called = true %}{% endif %}
{%- if m.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}{% endif %}
{{- '<|' + m.role + '|>' + (m.content or '') + '<|end|>' }}{% endfor %}
{{- '<tool_call>' if tools }}"""
COMMAND = [sys.executable, "-m", "tests.tools.mcp_calculator"]
TEXT = TextTokenizer(None)
LONG_S = 600.0


@pytest.fixture(scope="module")
def server() -> Iterator[ToolServer]:
    one = ToolServer(COMMAND)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def ended_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the servers of a test's dialogues, which end with their process otherwise."""
    begun: list[ToolServer] = []
    begin = ToolServer.__init__

    def noted(server: ToolServer, *given: Any) -> None:
        begin(server, *given)
        begun.append(server)

    monkeypatch.setattr(ToolServer, "__init__", noted)
    yield
    for server in begun:
        server.close()


def contains(answer: str, reference: object) -> float:
    return float(str(reference) in answer)


def dialogue(tmp_path: Path, **options: object) -> ToolDialogue:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n}+1?", "reference": n + 1}) + "\n" for n in range(40))
    )
    given = {"path": str(rows), "verifier": "tests.tools.test_tool_dialogue:contains"}
    given |= {"server": COMMAND, "calls_s": LONG_S} | options
    task = load_task(TaskSettings.model_validate({"name": "tools", "options": given}))
    assert isinstance(task, ToolDialogue)
    return task


def turn(text: str) -> list[int]:
    return TEXT.encode(text + "<|end|>")


def replied(task: ToolDialogue, *turns: list[int]) -> str:
    reply = task.reply("2", "", turns)
    return TEXT.light.decode(list(reply.tokens), skip_special_tokens=False)


def test_a_servers_tools_have_the_form_of_openais_protocol(server: ToolServer):
    add, *others = server.tools()
    assert add["function"]["name"] == "add"
    assert add["function"]["description"] == "Add two numbers."
    assert set(add["function"]["parameters"]["properties"]) == {"a", "b"}
    names = [tool["function"]["name"] for tool in others]
    assert names == ["read", "find", "fail", "sleep", "end", "flood"]


def test_a_tools_result_is_text_and_so_is_its_error(server: ToolServer):
    assert server.call("add", {"a": 1, "b": 2}, Deadline(LONG_S)) == "3"
    assert server.call("fail", {}, Deadline(LONG_S)).startswith("error: ")
    assert server.call("add", {"a": "many"}, Deadline(LONG_S)).startswith("error: ")


def test_a_resource_is_its_text_and_a_link_its_name_and_place(server: ToolServer):
    assert server.call("read", {"name": "a.txt"}, Deadline(LONG_S)) == "the text of a.txt"
    assert server.call("find", {"name": "a.txt"}, Deadline(LONG_S)) == "[a.txt: file:///a.txt]"


def test_a_long_result_is_cut(server: ToolServer):
    text = server.call("flood", {"count": RESULT_MAX + 7}, Deadline(LONG_S))
    assert text.endswith("\n[7 more characters]")


def test_a_server_that_hangs_or_ends_is_started_again(server: ToolServer):
    server.tools()
    with pytest.raises(ToolServerFailed, match="did not answer in time"):
        server.call("sleep", {"seconds": 300}, Deadline(0.2))
    assert len(server.tools()) == 7
    with pytest.raises(ToolServerFailed):
        server.call("end", {}, Deadline(LONG_S))
    assert len(server.tools()) == 7
    assert server.call("add", {"a": 1, "b": 2}, Deadline(LONG_S)) == "3"


def test_a_server_that_cannot_start_is_a_wrong_setting(tmp_path: Path):
    task = dialogue(tmp_path, server=["/no/such/program"])
    with pytest.raises(ConfigurationError, match="/no/such/program"):
        task.prompt(0, 0)


def test_a_dialogue_lists_tools_calls_them_and_judges_the_answer(tmp_path: Path):
    task = dialogue(tmp_path)
    assert isinstance(task, Environment)
    prompt = TEXT.light.decode(list(task.prompt(0, 0).tokens), skip_special_tokens=False)
    assert '"name": "add"' in prompt
    call = turn('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>')
    reply = replied(task, call)
    assert reply == "<|user|><tool_response>2</tool_response><|end|><|assistant|>"
    final = [call, TEXT.encode(reply), turn("It is 2.")]
    assert task.reply("2", "", final).tokens == ()
    assert task.judge("2", final).reward == 1.0


def test_a_wrong_call_gets_an_error_to_learn_from(tmp_path: Path):
    task = dialogue(tmp_path)
    assert "error: there is no tool sub" in replied(
        task, turn('<tool_call>{"name": "sub", "arguments": {}}</tool_call>')
    )
    assert "error: not JSON" in replied(task, turn("<tool_call>{</tool_call>"))


def test_the_number_of_turns_is_bounded(tmp_path: Path):
    task = dialogue(tmp_path, turns_max=2)
    call = turn('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>')
    assert replied(task, call)
    assert replied(task, call, turn("2"), call) == ""


def test_an_unknown_format_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="did you mean 'hermes'"):
        dialogue(tmp_path, calls="hermse")


def test_a_malformed_call_is_answered_also_where_a_result_needs_a_call(tmp_path: Path):
    task = dialogue(tmp_path)
    task._text.tokenizer.whole.chat_template = NEEDS_CALLS
    try:
        reply = replied(task, turn('<tool_call>{"name": </tool_call>'))
        assert reply.startswith("<|user|>error: not JSON")
    finally:
        task._server.close()


def test_a_command_line_may_be_text():
    server = ToolServer(" ".join(COMMAND))
    try:
        assert server.tools()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["-m", "no_such_server"], "No module named no_such_server"), (["-c", "1/0"], "ZeroDivision")],
)
def test_a_server_that_does_not_start_is_quoted(words: list[str], said: str):
    server = ToolServer([sys.executable, *words])
    with pytest.raises(ToolServerFailed, match=f"it printed last: .*{said}"):
        server.tools()


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path):
    """Also one that looks at nothing, as `kill -9` of a reward process shows."""
    mark = tmp_path / "pid"
    deaf = f"import os, threading; open({str(mark)!r}, 'w').write(str(os.getpid())); "
    deaf += "threading.Event().wait()"
    code = "import sys\nfrom rollstream.producers.tasks.tool_server import ToolServer\n"
    code += f"ToolServer([sys.executable, '-c', {deaf!r}]).tools()"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        pid = int(wait_for(lambda: mark.exists() and mark.read_text()))
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not is_alive(pid))
