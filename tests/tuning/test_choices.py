"""What may be chosen, and the settings that make a choice."""

from dataclasses import replace

import pytest

from rollstream.errors import ConfigurationError
from rollstream.plan.tuning.choices import changed_settings, choice_of, choice_space, gpus_of
from rollstream.plan.tuning.proposed_toml import merged_tables
from rollstream.run.config.settings import Configuration
from tests.tuning.worlds import configured

ON_GPUS = {
    "trainer": {"device": "cuda", "processes": 2},
    "devices": {"trainer": 2, "rollouts": 4},
    "rollouts": {"engine": "vllm", "count": 2, "vllm": {"tensor_parallel": 2}},
    "model": {"config": {}},
}


def applied(c: Configuration, changes: dict[str, object]) -> Configuration:
    return Configuration.model_validate(merged_tables(c.model_dump(mode="json"), changes))


def test_its_own_choice_changes_nothing():
    for c in (configured(), Configuration(), Configuration.model_validate(ON_GPUS)):
        assert changed_settings(c, choice_of(c)) == {}


def test_rollouts_of_two_gpus_and_a_trainer_of_two_take_six():
    c = Configuration.model_validate(ON_GPUS)
    assert gpus_of(c, choice_of(c)) == 6
    assert choice_space(c, 8).splits == ((1, 6), (2, 4), (3, 2))


def test_the_changed_settings_make_the_choice():
    c = Configuration.model_validate(ON_GPUS)
    choice = replace(
        choice_of(c), rollouts=3, trainer_gpus=4, slots=16, max_lag=1, waves=2,
        on_update="keep_version", repack_every_s=1.0,
    )  # fmt: skip
    changes = changed_settings(c, choice)
    assert choice_of(applied(c, dict(changes))) == choice
    assert changes["devices.trainer"] == changes["trainer.processes"] == 4
    assert changes["devices.rollouts"] == 6


def test_a_paced_trainer_on_more_gpus_is_a_faster_one():
    c = configured()
    choice = replace(choice_of(c), trainer_gpus=4)
    assert changed_settings(c, choice) == {"paced.train_token_s": 2.5e-5}


def test_workers_are_the_trainers_units_on_the_cpu():
    c = Configuration.model_validate({"trainer": {"workers": 2}})
    choice = replace(choice_of(c), trainer_gpus=3)
    assert changed_settings(c, choice) == {"trainer.workers": 3}


def test_no_bound_is_kept_as_waves_of_ready_groups():
    c = configured(dispatch={"max_lag": None, "ready_groups_max": 24})
    assert (choice_of(c).max_lag, choice_of(c).waves) == (None, 3)
    choice = replace(choice_of(c), waves=2)
    assert changed_settings(c, choice) == {"dispatch.ready_groups_max": 16}
    assert set(choice_space(c, 4).lags) == {(0, 1), (1, 2), (2, 3), (None, 2), (None, 3)}


def test_no_more_lag_is_chosen_than_the_configuration_permits():
    assert max(choice_space(configured(), 4).lags) == (2, 3)
    assert max(choice_space(configured(), 4, lag_max=8).lags) == (8, 9)


def test_drafts_are_chosen_only_where_their_gain_is_known():
    c = Configuration()
    assert choice_space(c, 4).drafts == (True,)
    assert choice_space(c, 4, has_drafts=True).drafts == (False, True)
    assert choice_space(c, 4, has_drafts=True, hold=frozenset({"drafts"})).drafts == (True,)


@pytest.mark.parametrize(
    ("configuration", "gpus", "hold", "message"),
    [
        (configured(), 1, (), "--gpus 1: a rollout of this configuration takes 1"),
        (Configuration.model_validate(ON_GPUS), 2, (), "give --gpus 3 or more"),
        (configured(), 2, ("split",), "the configuration takes 3 GPUs, --gpus gives 2"),
        (
            Configuration.model_validate(
                {"rollouts": {"engine": "vllm", "count": 1, "vllm": {"url": "http://a:8000"}}}
            ),
            8,
            (),
            "belongs to another server",
        ),
    ],
)
def test_too_few_gpus_are_refused_with_what_to_do(configuration, gpus, hold, message):
    with pytest.raises(ConfigurationError, match=message):
        choice_space(configuration, gpus, hold=frozenset(hold))
