"""Valid settings of a paced run, and refused ones."""

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.build import open_paced, roofline_from
from rollstream.producers.engines.paced.lengths import LogNormal
from rollstream.producers.engines.paced_settings import PacedSettings
from rollstream.producers.engines.roofline import batch_max
from rollstream.run.config.config import fingerprint, load
from rollstream.run.config.settings import Configuration
from testbed.repository import EXAMPLES

LONGTAIL = EXAMPLES / "longtail.toml"


def longtail(*overrides: str) -> Configuration:
    return load(LONGTAIL, overrides, {})


def test_the_example_matches_its_comments() -> None:
    c = longtail()
    prompts = int(c.task.options["prompts"])  # type: ignore[arg-type]
    assert c.trainer.steps * c.trainer.groups_per_step == 5 * prompts == 5 * 192
    assert c.paced.lengths.p99 == 10 * c.paced.lengths.median
    assert c.rollouts.context_max == 16_384
    lengths = LogNormal(c.paced.lengths.median, c.paced.lengths.p99)
    cut = [min(c.sampling.tokens_max, lengths.quantile((n + 0.5) / 10_000)) for n in range(10_000)]
    half_done = sum(n * n for n in cut) / (2 * sum(cut))  # long answers occupy a slot longer
    assert c.rollouts.slots * (half_done + 64) > (c.paced.kv_tokens or 0)
    assert roofline_from(c.paced.roofline) == roofline_from(PacedSettings().roofline)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learner=torch", "learner must be 'paced' with rollouts.engine = 'paced'"),
        ("rollouts.engine=torch", "learner must be 'torch' with rollouts.engine = 'torch'"),
        ("evaluation.enabled=true", "enabled must be false with rollouts.engine = 'paced'"),
        ("paced.kv_tokens=16383", "kv_tokens must be ≥ rollouts.context_max (16384)"),
        ("paced.lengths.p99=1599", "p99 must have a p99 ≥ its median (1600)"),
        ("paced.time_scale=0", "time_scale must be > 0"),
        ("paced.lengths.correlation=1.5", "correlation must be ≤ 1"),
        ("paced.weights_byte=5", "nearest known: paced.weights_bytes"),
        ("paced.changed_share=0", "changed_share must be > 0"),
    ],
)
def test_what_cannot_work_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        longtail(override)
    assert message in str(error.value)


def test_the_machine_may_change_within_a_run_but_not_what_is_generated() -> None:
    whole = fingerprint(longtail())
    for kept in ("paced.time_scale=9", "paced.kv_tokens=null", "paced.roofline.flops=1e15"):
        assert fingerprint(longtail(kept)) == whole
    for changed in ("paced.lengths.median=1000", "paced.weights_bytes=10", "paced.changed_share=1"):
        assert fingerprint(longtail(changed)) != whole


def test_an_engine_is_what_its_settings_describe() -> None:
    settings = PacedSettings(kv_tokens=5000, time_scale=1000.0)
    from rollstream.streams.values import Sampling
    from tests.support.engine_samples import V1, ask, prompt
    from tests.support.paced_samples import WEIGHTS, run_all

    engine = open_paced(settings, 40, WEIGHTS, V1, slots=8, context_max=4096)
    assert engine.stats().kv_capacity == 5000
    assert (
        batch_max(roofline_from(settings.roofline), engine.slots) == 8
    )  # an accelerator's B_max is far above
    assert len(run_all(engine, [ask("t", prompt(3), Sampling(tokens_max=20))])["t"].tokens) == 20
    free = open_paced(PacedSettings(), 40, WEIGHTS, V1, slots=8, context_max=4096)
    assert free.stats().kv_capacity == 8 * 4096
