"""Programs of other environments, roles that a template lacks, thoughts, and keys that are not
there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigurationError
from rollstream.http_guard import program_rule
from rollstream.producers.agent_settings import AgentSettings, require_service_key
from rollstream.producers.agents.answers import TurnAnswer, answer_events, answer_json
from rollstream.producers.agents.chat_format import ChatRefused, TemplateChat
from rollstream.producers.agents.conversation import history_hashes
from rollstream.producers.agents.requests import TurnRequest, read_request
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.code_environment import of_a_program, with_own_path
from rollstream.producers.tasks.tool_server import ToolServer
from rollstream.streams.bus import Bus
from rollstream.streams.values import Sampling
from testbed.agents.rollout import agent_rollout, assignment

LISTED_ROLES = """{%- for m in messages %}
{%- if m.role == 'system' and loop.first or m.role in ('user', 'assistant', 'tool') %}
{{- '<|' + m.role + '|>' + (m.content or '') + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def test_a_program_finds_modules_as_in_a_shell(bus: Bus, monkeypatch, tmp_path: Path):
    found = tmp_path / "environment"
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    code = f"import os; open({str(found)!r}, 'w').write(os.environ['PYTHONPATH'])"
    settings = AgentSettings(command=(sys.executable, "-c", f"{code}; raise SystemExit(1)"))
    with agent_rollout(bus, settings=settings) as rollout:
        rollout.in_loop(lambda: rollout.in_progress.start(assignment()))
        rollout.finished()
    assert found.read_text() == "/of/the/user"


def test_the_path_of_a_process_is_not_that_of_its_programs():
    below = with_own_path(with_own_path({"PYTHONPATH": "/a", "HOME": "/h"}))
    assert "/a" not in below["PYTHONPATH"].split(":")
    assert of_a_program(below) == {"PYTHONPATH": "/a", "HOME": "/h"}
    assert of_a_program(with_own_path({"HOME": "/h"})) == {"HOME": "/h"}


def test_a_tool_server_gets_the_environment_of_a_tasks_code(monkeypatch, tmp_path: Path):
    seen = tmp_path / "seen.json"
    code = (
        f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))\n"
        "from tests.tools.mcp_calculator import server; server.run()"
    )
    for name in ("JUDGE_KEY", "HF_HOME", "AWS_SECRET_ACCESS_KEY", "OTHER"):
        monkeypatch.setenv(name, name)
    server = ToolServer([sys.executable, "-c", code], ["JUDGE_KEY"])
    try:
        assert server.tools()
    finally:
        server.close()
    variables = json.loads(seen.read_text())
    assert (variables["JUDGE_KEY"], variables["HF_HOME"]) == ("JUDGE_KEY", "HF_HOME")
    assert not {"AWS_SECRET_ACCESS_KEY", "OTHER"} & variables.keys()


@pytest.fixture
def chat(tmp_path: Path) -> TemplateChat:
    tokenizer = TextTokenizer(None)
    tokenizer.whole.chat_template = LISTED_ROLES  # pyright: ignore[reportAttributeAccessIssue]
    return TemplateChat(tokenizer, "hermes")


def test_a_developer_is_the_system_of_an_older_template(chat: TemplateChat):
    def rendered(role: str) -> str:
        messages = [{"role": role, "content": "In French."}, {"role": "user", "content": "Hi"}]
        return chat.render(messages, (), True)

    assert rendered("developer") == rendered("system") != ""
    assert "In French." in rendered("developer")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (["Human"], "leaves out messages of the role 'Human'"),
        (["user", "function"], "leaves out messages of the role 'function' behind the first"),
        (["user", "system"], "leaves out messages of the role 'system' behind the first"),
        (["user", "developer"], "leaves out messages of the role 'system' behind the first"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    chat: TemplateChat, messages: list[str], said: str
):
    with pytest.raises(ChatRefused, match=said):
        chat.render([{"role": role, "content": "x"} for role in messages], (), True)


RUN = Sampling(1.0, 0, 1.0, 64, ())
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def thinking(**changes: Any) -> TurnAnswer:
    fields: dict[str, Any] = {
        "digest": "d", "content": "", "reasoning": "I add.", "tool_calls": (CALL,),
        "finish": "tool_calls", "prompt_ids": [1], "token_ids": [2], "logprobs": [0.0],
        "pieces": ["x"], "created_s": 0.0,
    }  # fmt: skip
    return TurnAnswer(**(fields | changes))


def request(items: list[dict[str, Any]]) -> TurnRequest:
    return read_request("response", {"model": "m", "input": items}, RUN)


@pytest.mark.parametrize(
    "answer", [thinking(), thinking(content="So:"), thinking(content="4", tool_calls=())]
)
def test_a_thought_of_the_route_responses_comes_back(answer: TurnAnswer):
    question = {"role": "user", "content": "2+2?"}
    body = answer_json(request([question]), answer)
    history = request([question, *body["output"]]).messages
    message: dict[str, Any] = {
        "role": "assistant", "content": answer.content, "reasoning_content": "I add.",
        "tool_calls": list(answer.tool_calls),
    }  # fmt: skip
    assert history_hashes(history, ())[-1] == history_hashes([question, message], ())[-1]
    events = "".join(answer_events(request([question]), answer))
    assert events.count("event: response.reasoning_text.delta") == 1
    assert body["output"][0]["type"] == "reasoning"


def test_log_probabilities_of_other_tokens_are_named_as_not_given():
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    assert read_request("chat", {**chat, "top_logprobs": 5}, RUN).overridden == ("top_logprobs",)
    assert read_request("chat", chat, RUN).overridden == ()
    text = {"model": "m", "prompt": "x", "logprobs": 5}
    assert read_request("completion", text, RUN).overridden == ("logprobs",)


@pytest.mark.parametrize("value", [None, "", "\n"])
def test_a_key_that_is_not_there_is_named(monkeypatch, value: str | None):
    monkeypatch.delenv("THE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("THE_KEY", value)
    with pytest.raises(ConfigurationError, match=r"agent\.key_env = 'THE_KEY'"):
        require_service_key("THE_KEY")
    require_service_key("")
    monkeypatch.setenv("THE_KEY", "right\n")
    require_service_key("THE_KEY")


@pytest.mark.parametrize(
    ("entry", "host"),
    [
        ("agents.example.org:8700", "agents.example.org"),
        ("*.example.org", ".example.org"),
        ("agents.example.org/", "agents.example.org"),
        ("Agents.Example.org", "agents.example.org"),
    ],
)
def test_a_host_may_be_listed_as_the_refusal_shows_it(entry: str, host: str):
    rule = program_rule("0.0.0.0", (), {"ROLLSTREAM_ALLOWED_HOSTS": entry})
    assert host in rule.names
