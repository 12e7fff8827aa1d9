"""`Objective` as one seam: every objective says truly which samples have no gradient, keeps its
state over a restart, and is all that learners know of a loss; a minimal one is trained.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollstream.consumers.objectives.surrogate import SurrogateObjective
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn import objective
from rollstream.consumers.trainer.learn.forward import PolicyScorer, policy_scorer, scoring_form
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.objective import (
    BatchLoss,
    MicroBatch,
    Objective,
    PastWeights,
    open_objective,
)
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, token_rows
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.errors import ConfigurationError
from testbed.repository import ROOT
from tests.trainer.learning_reference import build, sample, settings

VERSION = 5
CLIP: dict[str, Any] = {"loss": "ppo_clip"}
CASES: Mapping[str, dict[str, Any]] = {
    "truncated": {},
    "clipped": CLIP,
    "masked by divergence": {"loss": "dppo"},
    "entropy": {**CLIP, "entropy_bonus": 0.1},
    "ratio penalty": {**CLIP, "ratio_penalty": 0.1},
    "reference in the loss": {"reference_kl": 0.3},
    "reference in the reward": {"reference_kl": 0.3, "reference_kl_in": "reward"},
    "decoupled": {**CLIP, "proximal": "every 5"},
    "guarded": {"ess_guard": "scale"},
    "critic": {**CLIP, "advantage": "gae"},
    "critic on the policy": {**CLIP, "advantage": "gae", "critic": {"body": "policy"}},
}
GRADIENTLESS = {"truncated", "clipped", "masked by divergence", "decoupled"}
"""Where a sample of advantage 0 has no gradient."""


class Versions:
    """The run's versions: all equal to the starting model."""

    dtype = "float32"

    def read(self, number: int, term: int | None = None) -> Mapping[str, Tensor]:
        return dict(build().named_parameters())


def opened(case: str, trained: TrainerSettings | None = None) -> Objective:
    s = trained or settings(**CASES[case])
    return open_objective(s, build(), scoring_form(s), Versions())


def gradients(chosen: Objective, samples: Sequence[Sample]) -> list[Tensor]:
    """Of the policy's parameters and the objective's own, for the sum over the samples."""
    model = build()
    torch.manual_seed(1)
    for parameter in model.parameters():  # away from version 0, the reference
        parameter.data += 0.01 * torch.randn_like(parameter)
    chosen.begin_step(VERSION, dict(model.named_parameters()))
    rows, inputs = token_rows(samples), loss_inputs(samples, VERSION)
    batch = MicroBatch(samples, VERSION, rows, inputs, chosen.past(samples))
    computed = chosen.loss(batch, policy_scorer(model, keeps_states=chosen.reads_states))
    of = [*model.parameters(), *computed.joint]
    return [
        *torch.autograd.grad(computed.loss, of, materialize_grads=True),
        *computed.own_gradients,
    ]


def with_advantage(advantage: float) -> Sample:
    return replace(sample(np.random.default_rng(3), "t"), advantage=advantage)


@pytest.mark.parametrize("case", CASES)
def test_a_sample_said_to_have_no_gradient_has_exactly_none(case: str):
    chosen = opened(case)
    flat = with_advantage(0.0)
    assert chosen.has_gradient(flat) == (case not in GRADIENTLESS)
    assert chosen.has_gradient(with_advantage(-0.5))
    if not chosen.has_gradient(flat):
        assert not any(bool(gradient.any()) for gradient in gradients(chosen, [flat]))
    elif case != "guarded":  # the guard reads its ratios, which have no gradient
        assert any(bool(gradient.any()) for gradient in gradients(chosen, [flat]))


@pytest.mark.parametrize("case", CASES)
def test_a_sample_without_a_trained_token_has_no_gradient(case: str):
    masked = with_advantage(1.0)
    assert not opened(case).has_gradient(replace(masked, mask=np.zeros_like(masked.mask)))


def test_advantages_of_tokens_count_where_they_are_trained():
    shaped = with_advantage(0.0)
    of_tokens = np.zeros(len(shaped.mask))
    of_tokens[~shaped.mask] = 1.0
    chosen = opened("clipped")
    assert not chosen.has_gradient(replace(shaped, advantages=of_tokens))
    of_tokens[np.flatnonzero(shaped.mask)[-1]] = 1.0
    assert chosen.has_gradient(replace(shaped, advantages=of_tokens))


def own_loss(tokens: Any, _: Any) -> tuple[Tensor, Tensor]:
    """A user's loss that pulls every token, whatever its advantage."""
    return -tokens.logprobs * (tokens.advantage + 1), torch.zeros_like(tokens.logprobs) > 0


def test_a_users_loss_may_need_every_sample():
    s = settings(loss=f"{__name__}:own_loss")
    assert opened("truncated", s).has_gradient(with_advantage(0.0))


@pytest.mark.parametrize("case", CASES)
def test_state_is_restored_bit_for_bit(case: str):
    samples = [sample(np.random.default_rng(i), f"t{i}") for i in range(3)]

    def step(chosen: Objective) -> None:
        computed = gradients(chosen, samples)
        own = len(chosen.parameters)
        chosen.add(computed[len(computed) - own :])
        chosen.update(7.0)

    whole, resumed = opened(case), opened(case)
    step(whole)
    saved = {name: tensor.clone() for name, tensor in whole.state().items()}
    resumed.load_state(saved, 1)
    step(whole)
    step(resumed)
    assert whole.state().keys() == resumed.state().keys()
    assert all(torch.equal(whole.state()[n], t) for n, t in resumed.state().items())
    assert bool(whole.parameters) == case.startswith("critic")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"reference_kl": 0.1}, "trainer.reference_kl"),
        ({**CLIP, "proximal": "every 1"}, "trainer.proximal"),
        ({"advantage": "gae", "loss": "ppo_clip"}, "trainer.critic.body"),
        ({"advantage": "gae", "reference_kl": 0.1}, "trainer.reference_kl"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changed: dict[str, Any], named: str):
    with pytest.raises(ConfigurationError, match=named):
        objective.check_over_ranks(settings(**changed))


class LikelihoodObjective(Objective):
    """The likelihood of the samples, as SFT maximises it."""

    reads_states = False

    def __init__(self, *_: object) -> None:
        pass

    @staticmethod
    def check_over_ranks(settings: TrainerSettings) -> None:
        pass

    def has_gradient(self, sample: Sample) -> bool:
        return bool(sample.mask.any())

    def begin_step(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        pass

    def past(self, samples: Sequence[Sample]) -> PastWeights:
        return {}

    def leaves_policy(self, version: int) -> bool:
        return False

    def loss(self, batch: MicroBatch, score: PolicyScorer) -> BatchLoss:
        logprobs = score(batch.rows).logprobs
        loss, tokens = -logprobs.sum(), float(len(logprobs))
        sums = LossStatistics(loss=float(loss.detach()), weight=tokens, tokens=tokens)
        return BatchLoss(loss, logprobs, sums)

    def divisor(self, statistics: LossStatistics) -> float:
        return statistics.weight

    def metrics(self, statistics: LossStatistics) -> dict[str, float]:
        return statistics.metrics()


def test_a_minimal_objective_learns_in_the_learner(monkeypatch: pytest.MonkeyPatch):
    name = f"{__name__}:{LikelihoodObjective.__name__}"
    monkeypatch.setattr(objective, "OBJECTIVES", {"centred": name})
    learner = TorchLearner(build(), settings(advantage="centred", lr=3e-3))
    samples = [sample(np.random.default_rng(i), f"t{i}") for i in range(4)]
    losses: list[float] = []
    for _ in range(6):
        learner.submit(samples)
        losses.append(learner.finish_update()["loss"])
    learner.close()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


def test_the_objectives_of_the_registry_exist():
    for name in (*objective.OBJECTIVES.values(), objective.SURROGATE):
        assert issubclass(objective.load_option(name), SurrogateObjective)


WORDS = re.compile(r"critic|reference_|proximal|penalt|surrogate|gae$|entropy_bonus", re.IGNORECASE)


def test_learners_and_the_trainers_loop_know_no_part_of_an_objective():
    """Names in code; groups' rewards become advantages in `data/`, and `learn/` names the
    interface's registry and the parts that users import.
    """
    folder = ROOT / "consumers" / "trainer"
    known = {"objective.py", "surrogates.py", "surrogate_check.py"}
    files = [
        path
        for path in (*folder.glob("*.py"), *folder.glob("learn/*.py"), *folder.glob("sharded/*.py"))
        if path.name not in known
    ]
    assert len(files) > 20
    assert {f"{path.name}: {name}" for path in files for name in names_of(path)} == set()


def names_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    names |= {a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    return {name for name in names if WORDS.search(name)}
