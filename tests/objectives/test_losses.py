"""What every loss of ours keeps (`consumers/objectives/losses/`): the contract of a surrogate, the
direction of its advantage, and its paper's formula; and the smallest loss that does (`plain`).
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.objectives.losses.base import LossInputs, LossSettings, SurrogateInputs
from rollstream.consumers.objectives.losses.kinds import LossKind, find_surrogate, loss_kinds
from rollstream.consumers.trainer.learn.surrogate_check import check_surrogate


def plain(tokens: SurrogateInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """−log π · A, on policy (REINFORCE)."""
    return -tokens.logprobs * tokens.advantage, tokens.logprobs > 0


@dataclass(frozen=True)
class Token:
    """A token in plain numbers: log π, log μ and A. Where the paper stops the gradient, the formula
    reads `now`, which a difference quotient in `new` leaves as it is.
    """

    new: float
    now: float
    old: float
    advantage: float

    @property
    def ratio(self) -> float:
        return math.exp(self.new - self.old)

    @property
    def ratio_now(self) -> float:
        return math.exp(self.now - self.old)


@dataclass(frozen=True)
class Paper:
    """The loss of a token as a paper has it, and the settings with which it is compared."""

    formula: Callable[[Token, Any], float]
    settings: Mapping[str, Any] = field(default_factory=dict)


def truncated(token: Token, s: ObjectiveSettings) -> float:
    low, high = s.ratio_min, s.ratio_max
    if s.ratio_bounds_negative is not None and token.advantage < 0:
        low, high = s.ratio_bounds_negative
    return -token.new * token.advantage * max(low, min(token.ratio_now, high))


def clipped(token: Token, s: ObjectiveSettings) -> float:
    bounded = max(1 - s.clip_low, min(token.ratio, 1 + s.clip_high))
    term = min(token.ratio * token.advantage, bounded * token.advantage)
    if s.clip_dual is not None and token.advantage < 0:
        term = max(term, s.clip_dual * token.advantage)
    return -term


def masked(token: Token, s: ObjectiveSettings) -> float:
    moved = math.exp(token.now) - math.exp(token.old)
    is_outward = moved * token.advantage > 0
    is_masked = abs(moved) > s.divergence_max and is_outward
    return 0.0 if is_masked else -token.ratio * token.advantage


PAPERS: Mapping[str, tuple[Paper, ...]] = {
    # IMPALA, arXiv 1802.01561; TOPR, arXiv 2503.14286, section 3.
    "truncated_is": (
        Paper(truncated),
        Paper(truncated, {"ratio_max": 1.0, "ratio_min": 1.0, "ratio_bounds_negative": [0, 1]}),
    ),
    # PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 5.
    "ppo_clip": (Paper(clipped), Paper(clipped, {"clip_low": 0.1, "clip_dual": 1.5})),
    # DPPO, arXiv 2602.04879, the binary total-variation mask.
    "dppo": (Paper(masked), Paper(masked, {"divergence_max": 0.05})),
    "plain": (Paper(lambda token, s: -token.new * token.advantage),),
}
"""Loss → its formulas, written again from the paper."""
KINDS = {**loss_kinds(), "plain": LossKind(plain, LossSettings)}
CASES = [(name, paper) for name in KINDS for paper in PAPERS[name]]
LOGPROBS = (-0.05, -0.4, -1.3, -3.1)
ADVANTAGES = (-2.0, -0.6, 0.0, 0.7, 1.5)


def all_tokens() -> Iterator[Token]:
    for new, old, advantage in product(LOGPROBS, LOGPROBS, ADVANTAGES):
        yield Token(new, new, old - 0.01, advantage)


def settings_of(paper: Paper) -> ObjectiveSettings:
    return ObjectiveSettings.model_validate(dict(paper.settings))


def computed(kind: LossKind, settings: ObjectiveSettings) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of `all_tokens`, their gradient in log π, and whether a bound acted."""
    tokens = [*all_tokens()]
    new = torch.tensor([token.new for token in tokens], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([token.old for token in tokens], dtype=torch.float64)
    count, alone = len(tokens), torch.arange(len(tokens))
    advantage = torch.tensor([token.advantage for token in tokens], dtype=torch.float64)
    batch = LossInputs(old, advantage, alone, count, alone * 0, torch.ones(count), 0)
    losses, is_bounded = kind.function(SurrogateInputs(new, new - old, batch), settings)
    (gradient,) = torch.autograd.grad(losses.sum(), [new])
    return losses.detach(), gradient, is_bounded


def test_every_loss_has_its_formula() -> None:
    """Add that of a new loss to `PAPERS`."""
    assert PAPERS.keys() == KINDS.keys()


@pytest.mark.parametrize(("name", "paper"), CASES)
def test_a_loss_keeps_the_contract(name: str, paper: Paper) -> None:
    check_surrogate(KINDS[name].function, settings_of(paper))


@pytest.mark.parametrize(("name", "paper"), CASES)
def test_a_loss_is_zero_where_the_advantage_is(name: str, paper: Paper) -> None:
    losses, gradient, _ = computed(KINDS[name], settings_of(paper))
    is_zero = torch.tensor([token.advantage == 0 for token in all_tokens()])
    assert not losses[is_zero].any()
    assert not gradient[is_zero].any()
    assert gradient[~is_zero].any()


@pytest.mark.parametrize(("name", "paper"), CASES)
def test_a_loss_moves_no_token_against_its_advantage(name: str, paper: Paper) -> None:
    """And it moves each where both policies are nearly equal."""
    _, gradient, _ = computed(KINDS[name], settings_of(paper))
    for token, slope in zip(all_tokens(), gradient.tolist(), strict=True):
        assert slope * token.advantage <= 0, token
        if abs(token.new - token.old) < 0.02 and token.advantage:
            assert slope * token.advantage < 0, token


@pytest.mark.parametrize(("name", "paper"), CASES)
def test_a_loss_equals_its_paper(name: str, paper: Paper) -> None:
    settings, step = settings_of(paper), 1e-6
    losses, gradient, _ = computed(KINDS[name], settings)
    for token, loss, slope in zip(all_tokens(), losses.tolist(), gradient.tolist(), strict=True):
        assert loss == pytest.approx(paper.formula(token, settings), rel=1e-12, abs=1e-12)
        above, below = (
            paper.formula(Token(token.new + move, token.now, token.old, token.advantage), settings)
            for move in (step, -step)
        )
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-6), token


@pytest.mark.parametrize("name", loss_kinds())
def test_the_settings_of_a_loss_are_settings_of_the_trainer(name: str) -> None:
    """They are flat there, so losses with a setting of one name must mean the same."""
    kind = loss_kinds()[name]
    assert find_surrogate(name) is kind.function
    for key, setting in kind.settings.model_fields.items():
        flat = ObjectiveSettings.model_fields[key]
        assert (flat.annotation, flat.default, flat.metadata, flat.description) == (
            setting.annotation, setting.default, setting.metadata, setting.description,
        ), key  # fmt: skip
        assert setting.description, f"{key} needs its docstring"


def test_no_loss_needs_torch_until_it_is_called() -> None:
    code = (
        "import sys; from rollstream.consumers.objective_settings import ObjectiveSettings as s; "
        "print(len(s.model_fields) > 20, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
