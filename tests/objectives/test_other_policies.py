"""The policies besides the trained one: which version a step's reference and proximal policy are,
their log-probabilities, and the same bits after a restart, for any number of workers, and with
adapters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from rollstream.consumers.objective_settings import named_version, versions_needed
from rollstream.consumers.objectives.loss import OtherLogprobs, surrogate_loss
from rollstream.consumers.objectives.losses.base import LossInputs
from rollstream.consumers.objectives.policies.other_policies import OtherPolicies
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import ScoringForm
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.objective import MicroBatch
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, token_rows
from rollstream.consumers.trainer.learn.scores import TokenScores
from rollstream.errors import ConfigurationError
from rollstream.run.config.config import load
from rollstream.storage.model_folder.lora import LoraSettings, attach_adapters
from rollstream.streams.values import Version
from tests.support.shares import one_of
from tests.trainer.learn.test_learner_updates import stream, train, trained
from tests.trainer.learning_reference import build, reference_logprobs, sample, settings

KL = {"reference_kl": 0.5}
FORMS = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
}


def test_the_policy_of_version_0_has_no_distance_from_its_reference():
    learner = TorchLearner(build(), settings(**KL))
    first, second = train(learner, stream(2))
    learner.close()
    assert abs(first.get("reference_kl", 0.0)) < 1e-9
    assert second["reference_kl"] > 1e-6


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_metric_is_the_mean_distance_from_the_starting_model(form: str, compute: str):
    chosen = settings(**KL, reference_kl_form=form, lr=3e-3, compute=compute)
    learner = TorchLearner(build(), chosen)
    train(learner, stream(3))
    now = build()
    now.load_state_dict(learner.snapshot("float32"))
    samples = [sample(np.random.default_rng(4), str(i)) for i in range(4)]
    learner.submit(samples)
    found = learner.finish_update()["reference_kl"]
    learner.close()
    with torch.no_grad():
        pairs = [(reference_logprobs(now, s), reference_logprobs(build(), s)) for s in samples]
    apart = torch.cat([new - old for new, old in pairs]).double().numpy()
    expected = float(FORMS[form](apart).mean())
    assert found == pytest.approx(expected, rel=1e-3 if compute == "float32" else 0.3, abs=1e-6)


def test_a_large_weight_keeps_the_policy_near_its_reference():
    updates = stream(6)
    free, held = (
        trained(updates, reference_kl=weight, lr=3e-3).snapshot("float32") for weight in (0.0, 50.0)
    )
    rows = [sample(np.random.default_rng(9), str(i)) for i in range(6)]

    def distance(weights: dict[str, torch.Tensor]) -> float:
        model = build()
        model.load_state_dict(weights)
        with torch.no_grad():
            apart = [reference_logprobs(model, s) - reference_logprobs(build(), s) for s in rows]
        return float(torch.cat(apart).square().mean())

    assert distance(held) < 0.5 * distance(free)


@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2"])
def test_a_restart_has_the_same_reference_and_so_the_same_bits(name: str):
    updates = stream(4)
    whole = trained(updates, name, **KL)
    first = trained(updates[:2], name, **KL)
    second = TorchLearner(build(name), settings(**KL, workers=3))
    second.load_state(first.state())
    train(second, updates[2:])
    second.close()
    assert second.state_hash() == whole.state_hash() != trained(updates, name).state_hash()
    assert first.state().keys() == trained(updates[:2], name).state().keys()


def test_the_reference_of_adapters_is_their_base():
    model = build()
    attach_adapters(model, LoraSettings(rank=2), 5, torch.float32, "base")
    learner = TorchLearner(model, settings(**KL, lr=3e-3))
    first, second = train(learner, stream(2))
    learner.close()
    assert abs(first.get("reference_kl", 0.0)) < 1e-9
    assert second["reference_kl"] > 1e-6


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("v0", [0, 0, 0, 0, 0, 0]),
        ("v3", [0, 0, 0, 3, 3, 3]),
        ("every 1", [0, 1, 2, 3, 4, 5]),
        ("every 2", [0, 0, 2, 2, 4, 4]),
    ],
)
def test_the_version_of_a_policy_follows_from_the_version_trained_from(policy, expected):
    assert [named_version(policy, version) for version in range(6)] == expected


@pytest.mark.parametrize(
    "policy", ["v", "v-1", "every", "every 0", "every 2.5", "behaviour", "a/b"]
)
def test_other_names_are_no_versions(policy: str):
    assert named_version(policy, 9) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, set()),
        ({"reference": "every 4"}, set()),
        ({"reference_kl": 0.1}, set()),
        ({"reference_kl": 0.1, "reference": "every 4"}, {8, 12}),
        ({"reference_kl": 0.1, "reference": "v9"}, {9}),
        ({"proximal": "every 1"}, set()),
        ({"proximal": "behaviour"}, set(range(6, 15))),
    ],
)
def test_versions_are_kept_for_every_checkpoint(changed: dict, expected: set[int]):
    assert versions_needed(settings(**changed), [8, 10, 14], 2) == expected


@dataclass
class Published:
    """Versions as they were published, and which of them were read again."""

    dtype: str = "float32"
    weights: dict[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    read_again: list[int] = field(default_factory=list)

    def read(self, number: int, term: int | None = None) -> Mapping[str, torch.Tensor]:
        self.read_again.append(number)
        return self.weights[number]


def distances(past: Published, **changed) -> list[float]:
    """The metric of six steps, each with one update; every version is published."""
    learner = TorchLearner(build(), settings(**KL, lr=3e-3, **changed), past)
    found: list[float] = []
    for batches in stream(6):
        past.weights[learner.version] = learner.snapshot(past.dtype)
        found += [abs(one.get("reference_kl", 0.0)) for one in train(learner, [batches])]
    learner.close()
    return found


@pytest.mark.parametrize(
    ("reference", "at_itself"),
    [("every 2", {0, 2, 4}), ("every 3", {0, 3}), ("v2", {0, 2})],
)
def test_a_step_has_no_distance_from_a_reference_that_it_trains_from(reference, at_itself):
    past = Published()
    found = distances(past, reference=reference)
    assert {version for version, one in enumerate(found) if one < 1e-9} == at_itself
    assert past.read_again == [], "the learner has passed every version itself"


def test_a_version_is_rounded_as_it_was_published():
    """So what the trainer copies as it passes is what it reads again later."""
    assert distances(Published("bfloat16"), reference="every 2")[2] > 1e-8


@pytest.mark.parametrize("dtype", one_of(2, ["bfloat16", "float32"]))
@pytest.mark.parametrize(
    "chosen",
    [
        {**KL, "reference": "every 2"},
        {**KL, "reference": "every 2", "reference_kl_in": "reward"},
        {**KL, "reference": "v1"},
        {"loss": "ppo_clip", "proximal": "every 1"},
        {"loss": "ppo_clip", "proximal": "every 2"},
    ],
)
def test_a_restart_reads_its_policies_again_and_has_the_same_bits(chosen: dict, dtype: str):
    updates, past = stream(6), Published(dtype)
    whole = TorchLearner(build(), settings(lr=3e-3, **chosen), past)
    states = []
    for batches in updates:
        past.weights[whole.version] = whole.snapshot(dtype)
        states.append(whole.state())
        train(whole, [batches])
    whole.close()
    for version in range(6):
        again = TorchLearner(build(), settings(lr=3e-3, workers=3, **chosen), past)
        again.load_state(states[version])
        train(again, updates[version:])
        again.close()
        assert again.state_hash() == whole.state_hash()
    policy = chosen.get("proximal") or chosen["reference"]
    named = [named_version(policy, version) for version in range(6)]
    assert past.read_again == [n for version, n in enumerate(named) if n not in (0, version)]


def test_a_version_that_is_not_kept_is_named():
    first = trained(stream(3), reference="every 2", reference_kl=0.5)
    second = TorchLearner(build(), settings(**KL, reference="every 2"))
    second.load_state(first.state())
    with pytest.raises(ConfigurationError, match="version 2"):
        train(second, stream(1))
    second.close()


def test_a_reference_may_be_another_model(tmp_path: Path):
    teacher = build("qwen2")
    teacher.save_pretrained(tmp_path)
    learner = TorchLearner(build(), settings(**KL, reference=str(tmp_path), reference_kl_form="k1"))
    samples = [sample(np.random.default_rng(4), str(i)) for i in range(4)]
    (found,) = train(learner, [[samples]])
    learner.close()
    with torch.no_grad():
        apart = [reference_logprobs(build(), s) - reference_logprobs(teacher, s) for s in samples]
    assert found["reference_kl"] == pytest.approx(float(torch.cat(apart).mean()), abs=1e-5)


def test_a_reference_with_fewer_tokens_is_refused(tmp_path: Path):
    teacher = build("gpt2")
    teacher.resize_token_embeddings(20)
    teacher.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="20 tokens"):
        TorchLearner(build(), settings(**KL, reference=str(tmp_path)))


@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2"])
def test_each_token_is_scored_under_the_version_that_emitted_it(name: str):
    """Samples of one or two versions, with masked tokens."""
    models = {version: build(name) for version in (3, 5)}
    for version, model in models.items():
        torch.manual_seed(version)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    past = Published(weights={v: model.state_dict() for v, model in models.items()})
    form = ScoringForm(torch.float32, torch.device("cpu"), False, False)
    chosen = TrainerSettings(loss="ppo_clip", proximal="behaviour")
    policies = OtherPolicies(build(name), chosen, form, past)
    rng = np.random.default_rng(2)
    samples = [sample(rng, str(i)) for i in range(5)]
    rows, inputs = token_rows(samples), loss_inputs(samples, 5)
    batch = MicroBatch(samples, 5, rows, inputs, policies.behind(samples))
    found = policies.logprobs(batch).proximal
    assert found is not None
    with torch.no_grad():
        expected = torch.cat([under_its_versions(models, one) for one in samples])
    assert torch.allclose(found, expected, atol=1e-5)
    assert sorted(past.read_again) == [3, 5]
    policies.behind(samples)
    assert len(past.read_again) == 2, "weights stay in memory"


def under_its_versions(models: Mapping[int, torch.nn.Module], one: Sample) -> torch.Tensor:
    of_each = {version: reference_logprobs(model, one) for version, model in models.items()}  # type: ignore[arg-type]
    versions = [s.version.number for s in one.spans for _ in range(s.start, s.end)]
    trained = [version for version, used in zip(versions, one.mask, strict=True) if used]
    return torch.stack([of_each[version][i] for i, version in enumerate(trained)])


def test_only_versions_of_trained_tokens_are_read():
    past = Published(weights=dict.fromkeys(range(9), build().state_dict()))
    form = ScoringForm(torch.float32, torch.device("cpu"), False, False)
    chosen = TrainerSettings(loss="ppo_clip", proximal="behaviour")
    policies = OtherPolicies(build(), chosen, form, past)
    one = sample(np.random.default_rng(2), "0")
    one.mask[: one.spans[0].end] = False
    assert list(policies.behind([one])) == [Version(5, 1)]


REFUSED = [
    ({**KL, "processes": 2}, "reference_kl"),
    ({**KL, "advantage": "batch"}, "reference_kl"),
    ({**KL, "reference": "no/such/model"}, "trainer.reference"),
    ({"loss": "ppo_clip", "proximal": "every 1", "processes": 2}, "trainer.proximal"),
    ({"loss": "ppo_clip", "proximal": "every 0"}, "trainer.proximal"),
    ({"loss": "dppo", "proximal": "every 1"}, "trainer.proximal"),
]


@pytest.mark.parametrize(("given", "named"), REFUSED)
def test_what_does_not_go_together_is_refused(tmp_path: Path, given: dict, named: str):
    path = tmp_path / "run.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    path.write_text("\n".join(["[trainer]", *lines]))
    with pytest.raises(ConfigurationError, match=named):
        load(path)


def test_too_few_kept_versions_for_the_proximal_policy_are_refused(tmp_path: Path):
    path = tmp_path / "run.toml"
    trainer = '[trainer]\nloss = "ppo_clip"\nproximal = "behaviour"'
    path.write_text(f"{trainer}\n[weights]\nversions_max = 8\n")
    with pytest.raises(ConfigurationError, match=r"weights\.versions_max"):
        load(path)
    path.write_text(trainer)
    assert load(path).weights.versions_max > 8


def test_k2_without_rewards_descends_the_reverse_kl_to_a_teacher() -> None:
    """Distillation on policy: the gradient of the loss, in expectation over the tokens that the
    policy draws, is that of KL(π ‖ teacher), summed over the whole vocabulary.
    """
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(16, generator=random).requires_grad_()
    teacher = torch.randn(16, generator=random).log_softmax(0)
    policy = logits.log_softmax(0)
    each = policy.detach().clone().requires_grad_()  # each token drawn once
    inputs = LossInputs(
        behaviour=policy.detach(), advantage=torch.zeros(16), sequence=torch.arange(16),
        sequences=16, lag=torch.zeros(16, dtype=torch.int64), prompt_share=torch.ones(16), masked=0,
    )  # fmt: skip
    chosen = settings(reference_kl=1.0, reference_kl_form="k2", reference_by="score")
    scores = TokenScores(each, torch.zeros(16))
    loss, _ = surrogate_loss(scores, inputs, chosen, OtherLogprobs(teacher))
    (of_tokens,) = torch.autograd.grad(loss, each)
    (found,) = torch.autograd.grad((policy.exp().detach() * of_tokens * policy).sum(), logits)
    logits_kl = (logits.softmax(0) * (logits.log_softmax(0) - teacher)).sum()
    (expected,) = torch.autograd.grad(logits_kl, logits)
    assert torch.allclose(found, expected, atol=1e-6)
    assert float(expected.abs().max()) > 0.01


@pytest.mark.parametrize(
    ("reference", "needed"), [("v0", set()), ("v3", {3}), ("every 4", {4, 8}), ("/a/model", set())]
)
def test_the_versions_that_scorers_need_are_those_of_trainable_trajectories(
    reference: str, needed: set[int]
) -> None:
    """From a checkpoint of step 8 up to version 10, with trajectories of version 6 on."""
    chosen = settings(reference_kl=1.0, reference_by="score", reference=reference)
    assert versions_needed(chosen, (8, 10), 2) == needed
