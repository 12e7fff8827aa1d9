"""Worlds that the tests tune: a small paced configuration, and predictions by a formula."""

from rollstream.plan.tuning.choices import TuningChoice
from rollstream.run.config.settings import Configuration
from rollstream.simulator.experiment import Prediction

BASE = {
    "run": "small",
    "task": {"name": "numbered", "options": {"prompts": 8, "prompt_tokens": 10}},
    "sampling": {"tokens_max": 200},
    "rollouts": {
        "engine": "paced", "count": 2, "slots": 8, "context_max": 256, "on_update": "in_flight",
    },
    "dispatch": {"max_lag": 2},
    "trainer": {"learner": "paced", "groups_per_step": 8, "samples_per_group": 2},
    "paced": {
        "lengths": {"median": 50.0, "p99": 150.0}, "train_step_s": 0.05, "train_token_s": 1e-4,
    },
    "evaluation": {"enabled": False},
}  # fmt: skip


def configured(**tables: object) -> Configuration:
    """The small configuration, with these keys of its tables changed."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for name, changes in tables.items():
        values[name] = {**values.get(name, {}), **changes} if isinstance(changes, dict) else changes
    return Configuration.model_validate(values)


def two_sided(generate: float, train: float, policy: float = 1.0):
    """Predicts the speed of the slower side: tokens per second of one rollout and of one unit of
    the trainer. `keep_version` is slower by the factor `policy`.
    """

    def predicted(choice: TuningChoice) -> Prediction:
        each = generate * (policy if choice.on_update == "keep_version" else 1.0)
        speed = min(choice.rollouts * each, choice.trainer_gpus * train)
        return Prediction(speed, 0.5, 0.0, lag_mean=float(choice.waves - 1))

    return predicted
