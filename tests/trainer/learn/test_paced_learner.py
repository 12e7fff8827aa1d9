"""The learner that only keeps time: the same bits after a crash, the configured share of elements
changed, and the time that its tokens take.
"""

import numpy as np
import pytest
import torch

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.base import open_learner
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.paced import (
    PacedLearner,
    PacedModel,
    change_weights,
    make_weights,
)
from rollstream.errors import ConfigurationError

SIZE = 2 * 3_000_000  # one tensor of many rows and one with the rest
MODEL = PacedModel(3, SIZE, 0.01, step_s=4.0, token_s=0.5)


class HandClock:
    at_s = 0.0

    def now(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds


def learner(clock: HandClock | None = None, model: PacedModel = MODEL) -> PacedLearner:
    clock = clock or HandClock()
    return PacedLearner(model, TrainerSettings(), clock.now, clock.sleep)


def test_it_has_the_size_that_was_configured() -> None:
    weights = make_weights(MODEL)
    assert sum(tensor.nbytes for tensor in weights.values()) == SIZE
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert len(make_weights(PacedModel(3, 2, 0.01, 0, 0))) == 1


@pytest.mark.parametrize("share", [0.01, 0.003, 0.5, 1.0])
def test_a_step_changes_the_share_that_was_configured_by_one_bit(share: float) -> None:
    model = PacedModel(3, SIZE, share, 0, 0)
    weights, before = make_weights(model), make_weights(model)
    change_weights(weights, model, 1)
    changed = 0
    for name, tensor in weights.items():
        flips = tensor.view(torch.int16) ^ before[name].view(torch.int16)
        assert set(flips.unique().tolist()) <= {0, 1}
        assert bool(tensor.isfinite().all())
        changed += int(flips.sum())
    assert changed / (SIZE // 2) == pytest.approx(share, rel=0.01)


def test_steps_change_other_elements_each_time() -> None:
    one, other = make_weights(MODEL), make_weights(MODEL)
    change_weights(one, MODEL, 1)
    change_weights(other, MODEL, 2)
    name = next(iter(one))
    assert not torch.equal(one[name], other[name])


def test_resumed_from_a_checkpoint_the_hashes_are_those_of_one_that_went_on() -> None:
    whole, first, second = learner(), learner(), learner()
    hashes = [whole.finish_update() and whole.state_hash() for _ in range(5)]
    for _ in range(2):
        first.finish_update()
    kept = first.state()
    first.finish_update()  # the checkpoint is a copy
    second.load_state(kept)
    assert (second.updates, second.version) == (2, 2)
    for n in range(2, 5):
        second.finish_update()
        assert second.state_hash() == hashes[n]
    assert len(set(hashes)) == 5


def test_a_checkpoint_of_another_size_is_refused() -> None:
    other = learner(model=PacedModel(3, 2_000_000, 0.01, 0, 0))
    with pytest.raises(ConfigurationError, match=r"weights\.layers\.000\.weight"):
        learner().load_state(other.state())


def test_an_update_lasts_as_its_tokens_and_the_step(samples: list[Sample]) -> None:
    clock = HandClock()
    one = learner(clock)
    one.submit(samples[:4])
    clock.at_s += 1000.0  # it waited for data, and was idle then
    one.submit(samples[4:])
    metrics = one.finish_update()
    tokens = sum(len(sample.tokens) for sample in samples)
    late = sum(len(sample.tokens) for sample in samples[4:])
    assert clock.at_s == pytest.approx(1000 + 0.5 * late + 4.0)
    assert one.busy_s == pytest.approx(0.5 * tokens + 4.0)
    assert metrics["sequences"] == len(samples)
    assert metrics["tokens"] == sum(int(np.count_nonzero(s.mask)) for s in samples)
    assert one.micro_batches == 2


def test_a_published_copy_is_untouched_by_the_next_update() -> None:
    one = learner()
    copy = one.snapshot("bfloat16")
    kept = {name: tensor.clone() for name, tensor in copy.items()}
    one.finish_update()
    assert all(torch.equal(copy[name], kept[name]) for name in copy)


def test_which_learner_it_is_follows_from_the_model() -> None:
    assert isinstance(open_learner(MODEL, TrainerSettings()), PacedLearner)
    assert not issubclass(PacedLearner, TorchLearner)
