"""Updates: the same bits for any number of workers and after a restart; schedule, clipping,
failures.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.masters import hidden_matrices, learning_rate
from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.lora import LoraSettings, attach_adapters
from tests.trainer.learning_reference import (
    build,
    largest_difference,
    reference_loss,
    sample,
    settings,
)


def stream(updates: int, micro_batches: int = 4, seed: int = 0):
    """Micro-batches of some updates, of unequal sizes."""
    rng = np.random.default_rng(seed)
    return [
        [
            [sample(rng, f"{u}-{m}-{i}") for i in range(1 + 3 * (m % 3))]
            for m in range(micro_batches)
        ]
        for u in range(updates)
    ]


def train(learner: TorchLearner, updates) -> list[dict[str, float]]:
    metrics = []
    for batches in updates:
        for batch in batches:
            learner.submit(batch)
        metrics.append(learner.finish_update())
    return metrics


def trained(updates, name="qwen3_tied", **changed) -> TorchLearner:
    learner = TorchLearner(build(name), settings(**changed))
    train(learner, updates)
    learner.close()
    return learner


@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2"])
def test_any_number_of_workers_gives_the_same_bits(name):
    updates = stream(3, micro_batches=7)
    hashes = {trained(updates, name, workers=n).state_hash() for n in (1, 2, 5)}
    assert len(hashes) == 1


def test_updates_equal_torch_adamw_on_transformers_gradients():
    s = settings(gradient_norm_max=0.1, lr=1e-3, weight_decay=0.1, updates_per_step=2, steps=2)
    updates = stream(4)
    learner = TorchLearner(build(), s)
    metrics = train(learner, updates)
    learner.close()
    model = build()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=s.lr, betas=s.betas, weight_decay=s.weight_decay
    )
    for number, batches in enumerate(updates):
        optimiser.zero_grad()
        reference_loss(model, [one for batch in batches for one in batch], s).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.gradient_norm_max)
        assert metrics[number]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        optimiser.param_groups[0]["lr"] = learning_rate(number, s)
        optimiser.step()
    ours = {k: v for k, v in learner.snapshot("float32").items() if k != "lm_head.weight"}
    theirs = {k: v.detach() for k, v in model.named_parameters()}
    assert largest_difference(ours, theirs) < 1e-5
    assert (learner.updates, learner.version) == (4, 2)


@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2"])
def test_muon_updates_hidden_matrices_and_adamw_all_else(name):
    """Against torch's optimisers on transformers' gradients. Muon computes in bfloat16, so last
    bits of a gradient may change a hundredth of its update.
    """
    s = settings(optimiser="muon", lr=1e-2, weight_decay=0.1, steps=3)
    updates = stream(3)
    learner = TorchLearner(build(name), s)
    train(learner, updates)
    learner.close()
    model = build(name)
    layers = (".h.", ".layers.")
    named = dict(model.named_parameters())
    hidden = {n for n, p in named.items() if p.ndim == 2 and any(one in n for one in layers)}
    assert hidden == hidden_matrices(model)
    both = [
        torch.optim.Muon(
            [p for n, p in named.items() if n in hidden],
            weight_decay=0.1,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [p for n, p in named.items() if n not in hidden], betas=s.betas, weight_decay=0.1
        ),
    ]
    for number, batches in enumerate(updates):
        model.zero_grad()
        reference_loss(model, [one for batch in batches for one in batch], s).backward()
        for optimiser in both:
            optimiser.param_groups[0]["lr"] = learning_rate(number, s)
            optimiser.step()
    ours, begin = learner.snapshot("float32"), dict(build(name).named_parameters())
    for parameter, theirs in named.items():
        moved = (theirs - begin[parameter]).norm()
        if parameter.endswith("c_attn.bias"):
            continue  # a key's bias has no gradient but rounding, which Adam makes large
        bound = 0.05 if parameter in hidden else 0.02
        assert (ours[parameter] - theirs).norm() < bound * moved, parameter


def test_adapters_are_trained_by_muon_alone():
    model = build()
    attach_adapters(model, LoraSettings(rank=2), 5, torch.float32, "base")
    learner = TorchLearner(model, settings(optimiser="muon", lr=1e-2))
    before = learner.flat.clone()
    train(learner, stream(2))
    learner.close()
    assert not torch.equal(before, learner.flat)
    assert not learner.state()["optimiser.square." + next(iter(hidden_matrices(model)))].any()


@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2"])
def test_a_restart_with_muon_resumes_bit_for_bit(name):
    updates, chosen = stream(4), {"optimiser": "muon", "lr": 1e-2}
    whole = trained(updates, name, **chosen)
    first = trained(updates[:2], name, **chosen)
    second = TorchLearner(build(name), settings(workers=3, **chosen))
    second.load_state(first.state())
    train(second, updates[2:])
    second.close()
    assert second.state_hash() == whole.state_hash() != trained(updates, name).state_hash()


def test_epochs_are_updates_of_one_version():
    s = settings(epochs=2, updates_per_step=2, steps=3, lr_final=0.5)
    learner = TorchLearner(build(), s)
    train(learner, stream(8))
    learner.close()
    assert (learner.updates, learner.version) == (8, 2)
    assert learning_rate(11, s) == pytest.approx(0.5 * s.lr)


def test_a_restart_from_the_state_resumes_bit_for_bit():
    updates = stream(4)
    whole = trained(updates)
    first = trained(updates[:2])
    second = TorchLearner(build(), settings())
    second.load_state(first.state())
    assert second.state_hash() == first.state_hash()
    train(second, updates[2:])
    second.close()
    assert second.state_hash() == whole.state_hash()
    assert second.updates == 4


def test_state_and_snapshot_are_copies():
    updates = stream(2)
    learner = trained(updates[:1])
    state, snapshot, before = learner.state(), learner.snapshot("float32"), learner.state_hash()
    other = TorchLearner(build(), settings())
    other.load_state(state)
    train(other, updates[1:])
    other.close()
    assert learner.state_hash() == before != other.state_hash()
    assert all(torch.equal(state[f"masters.{n}"], snapshot[n]) for n in snapshot if "lm_" not in n)


def test_a_snapshot_has_checkpoint_names_and_ties_as_transformers_has_them():
    learner = TorchLearner(build(), settings())
    learner.close()
    snapshot = learner.snapshot("bfloat16")
    assert snapshot.keys() == build().state_dict().keys()
    assert {tensor.dtype for tensor in snapshot.values()} == {torch.bfloat16}
    embedding = snapshot["model.embed_tokens.weight"]
    assert snapshot["lm_head.weight"].data_ptr() == embedding.data_ptr()
    assert torch.equal(embedding, build().model.embed_tokens.weight.bfloat16())


def test_state_of_another_model_is_refused_by_name():
    learner = TorchLearner(build("qwen2"), settings())
    learner.close()
    with pytest.raises(ConfigurationError, match="belong to another model"):
        learner.load_state(trained([]).state())


def test_the_schedule_ramps_then_falls_on_a_line():
    s = settings(lr=1.0, lr_ramp_steps=5, lr_final=0.2, steps=30, updates_per_step=2)
    rates = [learning_rate(u, s) for u in range(60)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[59] == pytest.approx(0.2)
    assert max(rates) == rates[4] <= 1
    falls = np.diff(rates[4:])
    assert np.allclose(falls, falls[0])
    assert learning_rate(1000, s) == pytest.approx(0.2)


def test_micro_batches_are_counted_over_the_updates_of_a_step():
    learner = TorchLearner(build(), settings(updates_per_step=2))
    seen = []
    for batches in stream(4, micro_batches=3):
        train(learner, [batches])
        seen.append(learner.micro_batches)
    learner.close()
    assert seen == [3, 6, 3, 6]


def test_a_failure_in_a_worker_surfaces_in_the_caller():
    (batches,) = stream(1)
    bad = replace(batches[1][0], tokens=np.full_like(batches[1][0].tokens, 10_000))
    for workers in (1, 3):
        learner = TorchLearner(build(), settings(workers=workers))
        with pytest.raises(ComputeFailed, match=r"micro-batch 1 .*IndexError"):
            train(learner, [[batches[0], [bad], *batches[2:]]])
        with pytest.raises(ComputeFailed, match=r"micro-batch 1 .*IndexError"):
            learner.finish_update()
        learner.close()


class Tight(TorchLearner):
    """Its memory holds two samples."""

    def _compute(self, job):
        if len(job.samples) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._compute(job)


def test_a_micro_batch_that_memory_is_too_short_for_is_trained_in_halves():
    """The gradient is the sum over the halves."""
    (batches,) = stream(1)
    batch = [one for part in batches for one in part][:4]
    assert len(batch) == 4
    halved, whole = Tight(build(), settings()), TorchLearner(build(), settings())
    halved.submit(batch)
    assert halved.finish_update()["micro_batches_halved"] == 1
    whole.submit(batch[:2])
    whole.submit(batch[2:])
    whole.finish_update()
    assert halved.state_hash() == whole.state_hash()
    halved.close()
    whole.close()


def test_an_update_without_trained_tokens_moves_nothing():
    ((batch, *_),) = stream(1)
    hidden = [replace(one, mask=np.zeros_like(one.mask)) for one in batch]
    learner = trained([])
    before = learner.snapshot("float32")
    learner = TorchLearner(build(), settings())
    (metrics,) = train(learner, [[hidden]])
    learner.close()
    assert metrics["updates_skipped"] == 1
    assert metrics["masked_tokens"] == sum(len(one.mask) for one in hidden)
    assert largest_difference(before, learner.snapshot("float32")) == 0


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    updates = stream(2)
    updates[0][2][0] = replace(updates[0][2][0], advantage=float("nan"))
    learner = TorchLearner(build(), settings())
    first, second = train(learner, updates)
    learner.close()
    assert (first["updates_skipped"], second["updates_skipped"]) == (1, 0)
    assert all(tensor.isfinite().all() for tensor in learner.snapshot("float32").values())


def test_zero_weight_micro_batches_change_nothing():
    (batches,) = stream(1)
    hidden = [replace(one, mask=np.zeros_like(one.mask)) for one in batches[0]]
    assert trained([batches]).state_hash() == trained([[hidden, *batches]]).state_hash()


def test_busy_time_is_counted():
    learner = TorchLearner(build(), settings())
    (metrics,) = train(learner, stream(1))
    learner.close()
    assert 0 < metrics["busy_s"] == learner.busy_s
