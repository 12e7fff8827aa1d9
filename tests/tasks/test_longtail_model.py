"""`examples/longtail-model.toml`: lengths that a policy decides, in several passes."""

import numpy as np

from rollstream.config.config import load
from rollstream.producers.tasks.automaton import response_text
from rollstream.producers.tasks.registry import load_task
from testbed.repository import EXAMPLES

EXAMPLE = EXAMPLES / "longtail-model.toml"


def test_the_example_passes_several_times_over_its_prompts_with_all_mechanisms_on() -> None:
    c = load(EXAMPLE, environment={})
    prompts, passes = c.task.options["prompts"], 4
    assert c.trainer.steps * c.trainer.groups_per_step == passes * int(str(prompts))
    assert (c.rollouts.engine, c.rollouts.count) == ("torch", 4)
    assert c.rollouts.on_update == "keep_version"
    assert c.dispatch.repack
    assert c.dispatch.placement == "ranks"
    assert c.rollouts.is_drafting


def test_a_right_answer_to_each_prompt_ends_by_itself_and_the_tail_is_long() -> None:
    c = load(EXAMPLE, environment={})
    task = load_task(c.task)
    lengths: list[int] = []
    for position in range(96):
        prompt = task.prompt(0, position)
        steps = int(task.tokenizer().decode(prompt.tokens)[2::-1])
        lengths += [len(response_text(steps, 0, pace)) + 1 for pace in (1, 2)]
    assert max(lengths) <= c.sampling.tokens_max
    assert np.quantile(lengths, 0.99) >= 10 * np.median(lengths)
    assert c.sampling.tokens_max + len(task.prompt(0, 0).tokens) <= c.rollouts.context_max
