"""`trainer.compute = "bfloat16"`: rounded bodies, float32 masters, sums and heads; the same bits
after a restart.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollstream.consumers.trainer.learn.forward import policy_scorer
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.masters import Masters
from rollstream.consumers.trainer.learn.row_layout import token_rows
from tests.trainer.learn.other_architectures import build_other
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import build, sample, settings

BF16 = {"compute": "bfloat16"}


def any_model(name):
    return build(name) if name.startswith(("qwen3_", "llama")) else build_other(name)


def gradient(name, batches, **changed):
    """The summed gradient of one update, from Adam's first moment (it is (1 − β₁) of the mean)."""
    s = settings(**changed)
    learner = TorchLearner(any_model(name), s)
    (metrics,) = train(learner, [batches])
    learner.close()
    state = learner.state()
    flat = [t.flatten() for n, t in state.items() if n.startswith("optimiser.mean.")]
    assert {tensor.dtype for tensor in flat} == {torch.float32}
    return metrics, torch.cat(flat) * (metrics["tokens"] / (1 - s.betas[0]))


@pytest.mark.parametrize(
    "name", ["qwen3_tied", "llama_scaled_rope", "gemma3", "gpt_neox", "bloom_alibi"]
)
def test_gradients_point_where_float32_points(samples, name):
    exact, rounded = (gradient(name, [samples], **c) for c in ({}, BF16))
    assert torch.cosine_similarity(exact[1], rounded[1], dim=0) > 0.995
    assert not torch.equal(exact[1], rounded[1])
    assert rounded[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.05)


def test_micro_batches_are_summed_in_float32(samples):
    parts = [[one] for one in samples]
    alone = sum(gradient("qwen3_tied", [part], **BF16)[1] for part in parts)
    together = gradient("qwen3_tied", parts, **BF16)[1]
    in_16_bits = torch.zeros_like(together, dtype=torch.bfloat16)
    for part in parts:
        in_16_bits += gradient("qwen3_tied", [part], **BF16)[1].bfloat16()
    off = float((together - alone).norm() / alone.norm())  # pyright: ignore[reportAttributeAccessIssue]
    assert off < 1e-6 < 1e-3 < float((in_16_bits.float() - alone).norm() / alone.norm())  # pyright: ignore[reportAttributeAccessIssue]


def test_the_head_computes_in_float32(samples):
    """Compared with a float32 head and with one in 16 bits, over the same states of the body."""
    model, rows, seen = build("qwen3_untied"), token_rows(samples[:1]), []
    policy = policy_scorer(model, general=True)
    Masters(model, torch.bfloat16)
    model.model.register_forward_hook(lambda module, given, out: seen.append(out[0][0]))
    scores = policy(rows)
    hidden = seen[0].detach().index_select(0, rows.scored)
    weight = model.lm_head.weight.detach()
    assert {hidden.dtype, weight.dtype} == {torch.bfloat16}
    assert {part.dtype for part in scores[:2]} == {torch.float32}

    def logprobs(logits):
        chosen = torch.log_softmax(logits / rows.temperature[:, None], -1)
        return chosen.gather(1, rows.targets[:, None])[:, 0]

    exact = logprobs(hidden.float() @ weight.float().T)
    in_16_bits = logprobs((hidden @ weight.T).float())
    assert float((scores.logprobs.detach() - exact).abs().max()) < 2e-6
    assert float((in_16_bits - exact).abs().max()) > 1e-3, "the test could not fail"


def test_masters_stay_float32_and_the_model_sees_them_rounded():
    model = build("qwen3_tied")
    learner = TorchLearner(model, settings(lr=1e-5, **BF16))
    train(learner, stream(3))
    learner.close()
    masters = learner.snapshot("float32")
    assert masters.keys() == build("qwen3_tied").state_dict().keys()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].bfloat16())
        assert torch.equal(learner.snapshot("bfloat16")[name], parameter)
        assert not torch.equal(parameter.float(), masters[name]), "steps below 2⁻⁸ are kept"
    assert masters["lm_head.weight"].data_ptr() == masters["model.embed_tokens.weight"].data_ptr()
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}


def test_what_a_class_keeps_in_float32_stays_so():
    model = build("qwen3_tied")
    model._keep_in_fp32_modules_strict = {"q_norm"}
    masters = Masters(model, torch.bfloat16)
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {f"model.layers.{i}.self_attn.q_norm.weight" for i in range(2)}
    masters.flat.add_(1)
    masters.round()
    assert all(torch.equal(p, masters.named(masters.flat)[n].to(p.dtype))
               for n, p in model.named_parameters())  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_tied", "mistral_windowed"])
def test_a_restart_resumes_bit_for_bit(name):
    updates = stream(4)

    def learner_of(state=None):
        learner = TorchLearner(any_model(name), settings(workers=1, **BF16))
        if state is not None:
            learner.load_state(state)
        return learner

    whole, first = learner_of(), learner_of()
    train(whole, updates)
    train(first, updates[:2])
    second = learner_of(first.state())
    assert second.state_hash() == first.state_hash()
    train(second, updates[2:])
    assert second.state_hash() == whole.state_hash()
    for one in (whole, first, second):
        one.close()


def test_any_number_of_workers_gives_the_same_bits():
    updates, hashes = stream(2, micro_batches=5), set()
    for workers in (1, 3):
        learner = TorchLearner(build_other("gemma3"), settings(workers=workers, **BF16))
        train(learner, updates)
        learner.close()
        hashes.add(learner.state_hash())
    assert len(hashes) == 1


def test_an_update_lowers_the_loss_as_in_float32():
    """Advantages of 1: the sampled tokens become likelier."""
    rng = np.random.default_rng(5)
    batch = [replace(sample(rng, f"t{i}", masked=False), advantage=1.0) for i in range(6)]
    gains = {}
    for compute in ("float32", "bfloat16"):
        learner = TorchLearner(build("qwen3_tied"), settings(lr=3e-3, compute=compute, steps=20))
        metrics = train(learner, [[batch]] * 12)
        learner.close()
        gains[compute] = metrics[-1]["ratio_mean"] / metrics[0]["ratio_mean"]
    assert gains["bfloat16"] == pytest.approx(gains["float32"], rel=0.2)
    assert gains["bfloat16"] > 1.1
