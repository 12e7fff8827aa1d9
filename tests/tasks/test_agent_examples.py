"""The agents of `examples/agents/`: their tasks, their tool, and short runs."""

import json
import re
from pathlib import Path

import pytest

from examples.agents.tool_agent import TOOLS, calculate
from examples.agents.treasure import WAYS, Player, Treasure, look, play, world_of
from rollstream.producers.sandbox import factory
from rollstream.producers.sandbox.base import SandboxLimits
from rollstream.producers.sandbox.factory import SandboxPlan
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Document, Task, Teacher
from rollstream.producers.tasks.registry import load_task
from rollstream.producers.tasks.text import TaskText
from rollstream.producers.tasks.tool_calls import parse_tool_calls
from rollstream.producers.tasks.trained_tokenizer import TrainedTokenizer
from rollstream.run.config.config import load
from testbed.repository import ROOT
from testbed.servers import bubblewrap
from tests.tasks.test_examples import SHORT, run

PRODUCTS, TREASURE = "examples.agents.products:Products", "examples.agents.treasure:Treasure"


def load_example(name: str, folder: Path | None = None) -> Task:
    return load_task(TaskSettings(name=name, tokenizer=str(folder) if folder else None))


def text_of(task: Task, tokens: tuple[int, ...]) -> str:
    return task.tokenizer().decode(list(tokens))


def documents_of(task: Task, count: int) -> list[Document]:
    assert isinstance(task, Teacher)
    return task.documents(0, count)


@pytest.mark.parametrize("name", [PRODUCTS, TREASURE])
def test_the_saved_tokenizer_gives_the_tokens_of_the_trained_one(tmp_path: Path, name: str):
    task = load_example(name)
    assert isinstance(task.tokenizer(), TrainedTokenizer)
    task.tokenizer().save(tmp_path)
    again = load_example(name, tmp_path)
    assert not isinstance(again.tokenizer(), TrainedTokenizer)
    assert again.stop == task.stop
    assert again.tokenizer().special == task.tokenizer().special
    assert documents_of(again, 20) == documents_of(task, 20)
    assert again.prompt(0, 3) == task.prompt(0, 3)


def test_documents_guess_call_or_copy_and_all_are_right():
    task = load_example(PRODUCTS)
    seen: set[str] = set()
    for one in documents_of(task, 60):
        a, b = map(int, re.findall(r"(\d+)\*(\d+)=\?", text_of(task, one.prompt))[0])
        answer = text_of(task, one.response)
        seen.add(one.style)
        if one.style == "call":
            (call,) = parse_tool_calls(answer, "hermes", TOOLS).tool_calls
            assert (call.name, call.arguments) == (
                "calculate", json.dumps({"expression": f"{a}*{b}"}),
            )  # fmt: skip
        else:
            assert answer == str(a * b)
            assert ("<tool_response>" in text_of(task, one.prompt)) == (one.style == "copy")
    assert seen == {"guess", "call", "copy"}


def test_a_text_has_several_tokenizations():
    """Else the tokens of an episode could not drift from those that were sampled."""
    tokenizer = load_example(PRODUCTS).tokenizer()
    whole = tokenizer.encode("10")
    apart = [*tokenizer.encode("1"), *tokenizer.encode("0")]
    assert whole != apart
    assert tokenizer.decode(whole) == tokenizer.decode(apart) == "10"


def test_the_tool_computes_in_a_sandbox(monkeypatch: pytest.MonkeyPatch):
    bubblewrap.program()
    monkeypatch.setattr(
        factory, "configured_plan", lambda: SandboxPlan(limits=SandboxLimits(time_s=300))
    )
    assert calculate(json.dumps({"expression": "345*67"})) == "23115"
    assert calculate(json.dumps({"expression": "345*"})) == "error"
    of_the_host = str(ROOT / "pyproject.toml")
    assert calculate(json.dumps({"expression": f"open({of_the_host!r}).read()"})) == "error"


def explore(number: int) -> list[str]:
    """Commands of a player that walks along one wall, takes the key and opens the chest."""
    world, ways = world_of(number), list(WAYS)
    player, commands = Player(world.start), list[str]()
    while not player.is_done:
        at = ways.index(player.came) if player.came else 0
        turned = [ways[(at + turn) % 4] for turn in range(1, 5)]
        wanted = ["open chest", "take key", *(f"go {way}" for way in turned)]
        command = next(one for one in wanted if play(world, player, one))
        player = play(world, player, command) or player
        commands.append(command)
    return commands


def test_a_game_is_won_by_its_commands_alone():
    task = Treasure(TaskText(load_example(TREASURE).tokenizer()))  # pyright: ignore[reportArgumentType]
    text = TaskText(task.tokenizer())
    number = next(one for one in range(200, 300) if 10 <= len(explore(one)) <= 20)
    commands, turns = explore(number), list[tuple[int, ...]]()
    for index, command in enumerate(commands):
        turns.append(text.response(command))
        reply = task.reply(str(number), "", turns)
        assert reply == task.reply(str(number), "", turns), "a reply depends on its arguments alone"
        assert bool(reply.tokens) == (index + 1 < len(commands))
        assert task.judge(str(number), turns).reward == float(index + 1 == len(commands))
        turns.append(reply.tokens)


def test_a_game_is_lost_after_its_turns_and_refuses_what_is_impossible():
    task = Treasure(TaskText(load_example(TREASURE).tokenizer()), turns=2)  # pyright: ignore[reportArgumentType]
    text = TaskText(task.tokenizer())
    turns = [text.response("open door")]
    reply = task.reply("7", "", turns)
    seen = look(world_of(7), Player(world_of(7).start))
    assert f"not possible. {seen}" in text.tokenizer.decode(reply.tokens)
    turns += [reply.tokens, text.response("open door")]
    assert task.reply("7", "", turns).tokens == ()
    assert task.judge("7", turns).reward == 0


def test_the_agent_for_a_gpu_is_coherent(tmp_path: Path):
    fields = {"model_type": "qwen2", "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    path = ROOT / "examples/agents/tool-agent-1.5b.toml"
    c = load(path, [f"model.path={tmp_path}"], {})
    small = load(ROOT / "examples/agents/tool-agent.toml", [], {})
    assert c.agent.episode == small.agent.episode
    assert c.agent.turns_max == small.agent.turns_max
    assert c.rollouts.engine == "vllm"
    assert c.model.lora is not None
    assert c.trainer.compute == c.weights.dtype == "bfloat16"
    assert c.rollouts.vllm.memory_share < 0.5, "the trainer needs the rest of the card"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tool-agent", "treasure"])
def test_an_agent_runs_for_a_few_steps(tmp_path: Path, name: str):
    settings = [*SHORT, "sampling.tokens_max=64", "trainer.groups_per_step=2"]
    steps, _ = run(f"agents/{name}", tmp_path / "run", settings)
    assert [line["step"] for line in steps] == [1, 2]


@pytest.mark.long
def test_the_agent_learns_to_call_its_tool(tmp_path: Path):
    steps, _ = run("agents/tool-agent", tmp_path / "run", [])
    rewards = [line["reward_mean"] for line in steps]
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-5:]) / 5 > 0.8


@pytest.mark.long
def test_the_player_learns_to_find_the_treasure(tmp_path: Path):
    _, evaluations = run("agents/treasure", tmp_path / "run", [])
    first, last = evaluations[0]["accuracy_sampled"], evaluations[-1]["accuracy_sampled"]
    assert last >= first + 0.1
