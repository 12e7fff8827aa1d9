"""`examples/epochs.toml` asks the same 192 prompts in each of eight passes, with drafts on."""

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import RolloutSettings
from rollstream.producers.tasks.remainder import Remainder
from rollstream.run.config.config import load
from testbed.repository import EXAMPLES

EXAMPLE = EXAMPLES / "epochs.toml"


def test_the_example_passes_eight_times_over_its_prompts() -> None:
    c = load(EXAMPLE, environment={})
    prompts = c.task.options["prompts"]
    assert (prompts, c.rollouts.engine, c.rollouts.drafts) == (192, "torch", "history")
    assert c.trainer.steps * c.trainer.groups_per_step == 8 * 192


def test_every_pass_has_the_same_prompts_in_another_order() -> None:
    task = Remainder(prompts=192)
    passes = [[task.prompt(3, 192 * p + i) for i in range(192)] for p in range(3)]
    asked = [[one.tokens for one in each] for each in passes]
    assert len(set(asked[0])) == 192
    assert set(asked[0]) == set(asked[1]) == set(asked[2])
    assert asked[0] != asked[1]
    assert [each[0].epoch for each in passes] == [0, 1, 2]
    whole = Remainder()
    assert {one.tokens for one in passes[0]} <= {whole.prompt(0, i).tokens for i in range(41_000)}


def test_without_the_option_nothing_changed() -> None:
    assert Remainder().prompt(0, 5) == Remainder(prompts=0).prompt(0, 5)


@pytest.mark.parametrize("prompts", [-1, 10**6])
def test_more_prompts_than_there_are_are_refused(prompts: int) -> None:
    with pytest.raises(ConfigurationError, match="prompts"):
        Remainder(prompts=prompts).prompt(0, 0)


def test_drafts_are_refused_where_no_engine_makes_them() -> None:
    with pytest.raises(ConfigurationError, match="only 'torch' and 'vllm' draft"):
        load(EXAMPLE, ["rollouts.engine=paced"], environment={})
    url = "rollouts.vllm.url=http://127.0.0.1:8000"
    with pytest.raises(ConfigurationError, match=r"'off' with rollouts\.vllm\.url"):
        load(EXAMPLE, ["rollouts.engine=vllm", url], environment={})


def test_every_engine_drafts_by_default_that_can() -> None:
    server = ["rollouts.engine=vllm", "rollouts.vllm.url=http://127.0.0.1:8000"]
    paced = ["rollouts.engine=paced", "trainer.learner=paced", "evaluation.enabled=false"]
    given = [
        ["rollouts.engine=torch"],
        ["rollouts.engine=vllm"],
        [*server, "rollouts.count=1"],
        paced,
    ]
    asked = [[*engine, "rollouts.drafts=auto"] for engine in given]
    drafting = [load(EXAMPLE, one, environment={}).rollouts.is_drafting for one in asked]
    assert drafting == [True, True, False, False]
    assert RolloutSettings().is_drafting
    assert not RolloutSettings(drafts="off").is_drafting
