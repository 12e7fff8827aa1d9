"""Several tasks as one: exact weights, positions of their own, stateless rewards."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import PartSettings, TaskSettings
from rollstream.producers.tasks.base import Environment, Reply, Task
from rollstream.producers.tasks.character_tokenizer import EOS
from rollstream.producers.tasks.mixture import MixtureCycle
from rollstream.producers.tasks.registry import load_task
from rollstream.producers.tasks.remainder import Remainder
from rollstream.producers.tasks.scripted import Scripted


def mixture(*parts: PartSettings) -> Task:
    return load_task(TaskSettings(name="mixture", parts=parts))


BOTH = (PartSettings(name="remainder", weight=3), PartSettings(name="scripted", label="talk"))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_weights_are_honoured_exactly_over_a_cycle_and_nearly_always(weights: list[int]):
    cycle, total = MixtureCycle(weights), sum(weights)
    seen = Counter[int]()
    for position in range(2 * len(cycle)):
        turn = cycle.at(position)
        assert turn.place == seen[turn.part]  # each part follows its own order without a gap
        seen[turn.part] += 1
        for part, weight in enumerate(weights):
            assert abs(seen[part] - weight * (position + 1) / total) < len(weights)
    assert all(seen[part] == 2 * len(cycle) * w // total for part, w in enumerate(weights))


def test_any_position_may_be_asked_first():
    """A restart asks for the same prompts (the order is a function of position)."""
    forward = [MixtureCycle([5, 2, 1]).at(position) for position in range(100)]
    assert [MixtureCycle([5, 2, 1]).at(position) for position in reversed(range(100))] == forward[
        ::-1
    ]
    assert MixtureCycle([0.5, 0.2, 0.1]).at(77) == forward[77]


def test_weights_that_never_come_round_are_refused():
    with pytest.raises(ConfigurationError, match="give rounder ones"):
        MixtureCycle([1.0, 0.33333333])


def test_prompts_are_those_of_the_parts_under_their_labels():
    task, own = mixture(*BOTH), Remainder()
    prompts = [task.prompt(4, position) for position in range(80)]
    assert Counter(prompt.task for prompt in prompts) == {"remainder": 60, "talk": 20}
    asked = [prompt for prompt in prompts if prompt.task == "remainder"]
    assert [prompt.tokens for prompt in asked] == [own.prompt(4, i).tokens for i in range(60)]
    assert {prompt.stop for prompt in asked} == {(EOS,)}


def test_judgements_and_replies_find_their_part_in_a_fresh_process():
    prompts = [mixture(*BOTH).prompt(0, position) for position in range(4)]
    asked = next(prompt for prompt in prompts if prompt.task == "remainder")
    talk = next(prompt for prompt in prompts if prompt.task == "talk")
    fresh, encode = mixture(*BOTH), Remainder().tokenizer().encode
    answer = json.loads(json.loads(asked.reference)["of"])["answer"]
    assert fresh.judge(asked.reference, [[*encode("=" + answer), EOS]]).reward == 1.0
    assert isinstance(fresh, Environment)
    assert fresh.reply(asked.reference, "", [[EOS]]) == Reply(())
    own = json.loads(talk.reference)["of"]
    assert fresh.reply(talk.reference, "", [[4]]) == Scripted().reply(own, "", [[4]])


def test_a_mixture_without_dialogues_holds_no_slots():
    assert not isinstance(mixture(BOTH[0]), Environment)


def test_held_out_prompts_are_mixed_by_weight_and_held_out_by_the_parts():
    held_out = mixture(*BOTH).held_out(40)
    assert Counter(prompt.task for prompt in held_out) == {"remainder": 30, "talk": 10}
    assert mixture(*BOTH).held_out(10) == held_out[:10]
    own = [prompt.tokens for prompt in Remainder().held_out(30)]
    assert [prompt.tokens for prompt in held_out if prompt.task == "remainder"] == own


def test_warm_up_documents_are_mixed_by_weight():
    two = mixture(
        PartSettings(name="remainder", label="a", weight=2, options={"direct": 1.0, "jump": 0.0}),
        PartSettings(name="remainder", label="b", options={"direct": 0.0, "jump": 0.0}),
    )
    assert isinstance(two, type(mixture(BOTH[0])))
    documents = two.documents(0, 30)  # pyright: ignore[reportAttributeAccessIssue]
    assert Counter(one.style for one in documents) == {"direct": 20, "full": 10}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), r"has no parts: add \[\[task.parts\]\]"),
        ((BOTH[0], BOTH[0]), "2 parts are called 'remainder'"),
        ((BOTH[0], PartSettings(name="mixture")), r"task.parts\[1\].name: a mixture cannot be"),
        ((BOTH[0], PartSettings(name="scriptd")), r"task.parts\[1\].name.*did you mean 'scripted'"),
        (
            (PartSettings(name="scripted", options={"turn": 1}),),
            r"task.parts\[0\].options of scripted: no option 'turn'; did you mean 'turns'",
        ),
        (
            (BOTH[0], PartSettings(name="reasoning_gym", options={"dataset": "gcd"})),
            r"remainder and gcd have different tokenizers \(18 and 262 tokens\)",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts: tuple[PartSettings, ...], message: str):
    with pytest.raises(ConfigurationError, match=message):
        mixture(*parts)


def test_a_part_that_cannot_is_named():
    with pytest.raises(ConfigurationError, match=r"task.parts: talk has no documents"):
        mixture(*BOTH).documents(0, 20)  # pyright: ignore
    with pytest.raises(
        ConfigurationError, match=r"task.parts: talk, its share .*: evaluation.prompts = 1000"
    ):
        mixture(*BOTH).held_out(4000)


def test_errors_of_a_part_name_its_own_settings(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    options = {"path": str(tmp_path / "rows.jsonl"), "verifier": "math:fsum"}
    part = PartSettings(name="dataset", options={**options, "held_out_share": 2.0})
    numbered = PartSettings(name="numbered", label="other")
    with pytest.raises(ConfigurationError, match=r"task\.parts\[1\]\.options of dataset: held_out"):
        load_task(TaskSettings(name="mixture", parts=(numbered, part)))
    with pytest.raises(ConfigurationError, match=r"task\.parts\[0\]\.options of numbered: prompts"):
        load_task(
            TaskSettings(
                name="mixture", parts=(PartSettings(name="numbered", options={"prompts": 0}),)
            )
        )
