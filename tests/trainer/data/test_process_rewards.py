"""Rewards of turns and tokens: what a vector means, the advantage of each token by the formula of
its paper, and that a release without the feature refuses the run (invariant 14).
"""

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.credit import part_rewards, token_advantages, whole_reward
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.learn.row_layout import loss_inputs
from rollstream.errors import ConfigurationError, NewerRelease
from rollstream.run.config.config import load
from rollstream.run.config.recorded_configuration import record_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import read_or_create_identity
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.release import KNOWN_FEATURES, PROCESS_REWARDS
from rollstream.streams.values import Span, Turn, Version
from testbed.memory import MemoryStore
from tests.trainer.data.test_intake_of_foreign_records import RECORD

SETTINGS = TrainerSettings(process_rewards=True, advantage="centred", survivors_min=1)


def episode(name: str, sources: list[int], turns: tuple[int, ...] = ()) -> Trajectory:
    """An answer with these sources; `turns` are the ends of an agent's turns."""
    generated = sources.count(1)
    made = tuple(Turn("d", "h", 0, 0, end, "stop", 0.0, 0.0) for end in turns)
    return msgspec.structs.replace(
        RECORD, trajectory=name, group=0, tokens=np.arange(5, 5 + len(sources), dtype=np.uint32),
        sources=np.array(sources, np.uint8), logprobs=np.full(generated, -1.0, np.float32),
        spans=(Span(0, generated, Version(0, 1)),), reward=None, turns=made,
    )  # fmt: skip


def notes(**values: list[float]) -> dict[tuple[str, str], Annotation]:
    return {
        (name, "reward"): Annotation(name, 0, "reward", np.array(some, np.float32), "judge")
        for name, some in values.items()
    }


DIALOGUE = [0, 0, 1, 1, 1, 2, 1, 1]  # three generated tokens, one of the environment, two generated


@pytest.mark.parametrize(
    ("values", "ends"), [([4.0], [4]), ([1.0, 2.0], [2, 4]), ([1.0, 0.0, 0.0, 2.0, 3.0], range(5))]
)
def test_values_are_of_the_answer_its_turns_or_its_tokens(values, ends):
    found = part_rewards(episode("a", DIALOGUE), values)
    assert not isinstance(found, str)
    assert (found.tokens, found.ends.tolist(), found.rewards.tolist()) == (5, list(ends), values)


def test_an_agents_turns_are_those_of_its_record():
    """The second turn generated nothing: its reward counts at the end of the first."""
    record = episode("a", [0, 1, 1, 0, 0, 1], turns=(3, 4, 6))
    found = part_rewards(record, [1.0, 10.0, 100.0])
    assert not isinstance(found, str)
    assert dict(zip(found.ends.tolist(), found.rewards.tolist(), strict=True)) == {
        1: 11.0,
        2: 100.0,
    }


def test_another_number_of_values_is_no_reward():
    records = [episode("a", DIALOGUE), episode("b", DIALOGUE)]
    noted = notes(a=[1.0, 2.0, 3.0], b=[1.0, 2.0])
    found = prepare_group(0, records, noted, training_rule(SETTINGS, None, False), 0)
    assert [one.trajectory for one in found.samples] == ["b"]
    assert found.counts["unscored"] == 1
    alone = prepare_group(0, records[:1], noted, training_rule(SETTINGS, None, False), 0)
    assert alone.ending == "dead"
    assert "reward: 3 values for 2 turns and 5 generated tokens" in alone.detail


def by_the_paper(rewards: list[list[tuple[int, float]]], tokens: list[int]) -> list[list[float]]:
    """DeepSeekMath 4.1.3 in loops: normalise all step rewards of the group, then sum those of the
    steps that end at or after a token.
    """
    every = [reward for steps in rewards for _, reward in steps]
    mean, std = np.mean(every), np.std(every, ddof=1)
    return [
        [float(sum((r - mean) / (std + 1e-4) for e, r in steps if e >= t)) for t in range(count)]
        for steps, count in zip(rewards, tokens, strict=True)
    ]


def test_a_tokens_advantage_is_that_of_the_paper():
    records = [episode("a", DIALOGUE), episode("b", [0, 1, 1, 1, 1]), episode("c", DIALOGUE)]
    noted = notes(a=[1.0, 0.0], b=[0.5], c=[0.0, 0.1, 0.9, 0.0, 1.0])
    settings = SETTINGS.model_copy(update={"advantage": "grpo"})
    found = prepare_group(0, records, noted, training_rule(settings, None, False), 0)
    dense = [np.float64(np.float32(x)) for x in (0.0, 0.1, 0.9, 0.0, 1.0)]
    steps = [[(2, 1.0), (4, 0.0)], [(3, 0.5)], list(enumerate(dense))]
    for sample, expected in zip(found.samples, by_the_paper(steps, [5, 4, 5]), strict=True):
        assert sample.advantages is not None
        assert sample.advantages.tolist() == pytest.approx(expected)
        assert sample.advantage == pytest.approx(expected[0])
    assert [one.reward for one in found.samples] == pytest.approx([1.0, 0.5, 2.0])


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-5, 5)), min_size=2, max_size=6))
def test_one_reward_each_gives_every_token_the_advantage_of_its_answer(answers):
    parts = [whole_reward(tokens, reward) for tokens, reward in answers]
    each = advantages([reward for _, reward in answers], "grpo")
    for found, (tokens, _), expected in zip(
        token_advantages(parts, each), answers, each, strict=True
    ):
        assert found.tolist() == [expected] * tokens


def test_the_loss_gets_the_advantage_of_each_trained_token():
    """Masked tokens have none, and a sample beside others without vectors keeps its own."""
    records = [episode("a", DIALOGUE), episode("b", DIALOGUE)]
    noted = notes(a=[1.0, 0.0], b=[0.0, 0.0])
    a, b = prepare_group(0, records, noted, training_rule(SETTINGS, None, False), 0).samples
    a.mask[0] = False
    found = loss_inputs([a, b], 0).advantage.tolist()
    assert found == pytest.approx([0.5, 0.5, -0.25, -0.25, -0.5, -0.5, -0.5, -0.25, -0.25])


def test_terms_add_up_by_part():
    settings = SETTINGS.model_copy(update={"reward_terms": {"reward": 1.0, "style": 0.5}})
    noted = notes(a=[2.0]) | {
        ("a", "style"): Annotation("a", 0, "style", np.array([1.0, 3.0], np.float32), "judge")
    }
    rule = training_rule(settings, None, False)
    (only,) = prepare_group(0, [episode("a", DIALOGUE)], noted, rule, 0).samples
    assert only.reward == 2.0 + 0.5 * 4
    assert only.advantages is not None
    assert only.advantages.tolist() == pytest.approx([0.0] * 3 + [1.5] * 2)  # 0.5 and 3.5 centred


def test_without_the_setting_the_first_value_is_the_reward():
    records = [episode("a", DIALOGUE), episode("b", DIALOGUE)]
    settings = SETTINGS.model_copy(update={"process_rewards": False})
    rule = training_rule(settings, None, False)
    a, b = prepare_group(0, records, notes(a=[1.0, 5.0], b=[0.0]), rule, 0).samples
    assert (a.reward, b.reward, a.advantage, a.advantages) == (1.0, 0.0, 0.5, None)


def test_equal_parts_are_filtered_and_equal_sums_are_not():
    settings = SETTINGS.model_copy(update={"filter_equal_rewards": True})
    records = [episode("a", DIALOGUE), episode("b", DIALOGUE)]

    def ending(a: list[float], b: list[float]) -> str:
        rule = training_rule(settings, None, False)
        return prepare_group(0, records, notes(a=a, b=b), rule, 0).ending

    assert ending([1.0, 1.0], [1.0, 1.0]) == "filtered"
    assert ending([1.0, 0.0], [0.0, 1.0]) == ""


def test_invariant_14_a_release_without_the_feature_refuses_the_run(monkeypatch):
    store = MemoryStore()
    configuration = Configuration(run="parts", trainer=TrainerSettings(process_rewards=True))
    read_or_create_identity(store, "parts")
    record_configuration(store, configuration)
    assert PROCESS_REWARDS in read_or_create_identity(store, "parts").needs
    older = KNOWN_FEATURES - {PROCESS_REWARDS}
    monkeypatch.setattr("rollstream.streams.release.missing_features.__defaults__", (older,))
    with pytest.raises(NewerRelease, match=PROCESS_REWARDS):
        read_or_create_identity(store, "parts")


def test_a_run_without_the_setting_needs_nothing_new():
    store = MemoryStore()
    read_or_create_identity(store, "plain")
    record_configuration(store, Configuration(run="plain"))
    assert PROCESS_REWARDS not in read_or_create_identity(store, "plain").needs


def test_an_advantage_of_the_whole_batch_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('run = "x"\n[trainer]\nadvantage = "batch"\nprocess_rewards = true\n')
    with pytest.raises(ConfigurationError, match="process_rewards"):
        load(path)
