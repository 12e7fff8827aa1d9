"""A learner with a critic: values from its own body or the policy's, a warm-up, the values of the
first pass, the same bits after a restart, and versions without any of it.
`test_objective_references.py` holds its loss to the papers.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.consumers.credit import PartRewards, whole_reward
from rollstream.consumers.objectives.critic.gae import actions_of
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.sharded.learner import ShardedLearner
from rollstream.errors import ConfigurationError, NewerRelease
from rollstream.run.config.config import load
from rollstream.run.config.recorded_configuration import record_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.model_folder.lora import LoraSettings, attach_adapters
from rollstream.streams.records import GENERATED, PROMPT
from rollstream.streams.release import CRITIC, KNOWN_FEATURES
from rollstream.streams.values import Span, Version
from testbed.memory import MemoryStore
from tests.trainer.data.test_process_rewards import DIALOGUE, episode, notes
from tests.trainer.learn.test_learner_updates import train
from tests.trainer.learning_reference import build, sample, settings

OWN, POLICY = {"body": "own"}, {"body": "policy"}
GAE = {"advantage": "gae", "loss": "ppo_clip", "lr": 3e-3}


def rewarded(one: Sample, reward: float) -> Sample:
    return replace(one, reward=reward, parts=whole_reward(len(one.mask), reward))


def batches(updates: int, size: int = 4, seed: int = 0) -> list[list[list[Sample]]]:
    """Updates of three micro-batches; the reward of a sample is what its first token says."""
    rng = np.random.default_rng(seed)
    made = [
        [
            [sample(rng, f"{u}-{m}-{i}", turn_count=1 + i % 3) for i in range(1 + m * size)]
            for m in range(3)
        ]
        for u in range(updates)
    ]
    return [[[rewarded(s, float(s.tokens[0] % 2)) for s in b] for b in u] for u in made]


def learner(name: str = "qwen3_tied", critic: dict[str, Any] = OWN, **changed: Any) -> TorchLearner:
    return TorchLearner(build(name), settings(**GAE, critic=critic, **changed))


def trained(updates: Any, *given: Any, **changed: Any) -> TorchLearner:
    made = learner(*given, **changed)
    train(made, updates)
    made.close()
    return made


def policy_state(one: TorchLearner) -> torch.Tensor:
    return one.flat.clone()


@pytest.mark.parametrize("critic", [OWN, POLICY], ids=["own", "policy"])
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_untied", "gpt2"])
def test_values_are_the_heads_product_with_the_states_before_the_tokens(name, critic):
    """In the packed and the general form, against transformers' own hidden states."""
    made = trained(batches(3), name, critic)
    tensors = made.state()
    model = build(name)
    if critic == POLICY:
        model.load_state_dict(made.snapshot("float32"))
    else:
        mine = {
            n.removeprefix("critic.masters.model."): t
            for n, t in tensors.items()
            if n.startswith("critic.masters.model.")
        }
        model.load_state_dict(mine, strict=False)
    head = tensors["critic.masters.value.weight"][0], tensors["critic.masters.value.bias"]
    assert head[0].abs().max() > 0
    [[*_, chosen]] = batches(1, seed=9)
    expected: list[float] = []
    for one in chosen:
        tokens = torch.from_numpy(one.tokens.astype(np.int64))[None]
        with torch.no_grad():
            states = model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]
        before = np.flatnonzero(one.sources == GENERATED)[one.mask] - 1
        expected += (states[before] @ head[0] + head[1]).tolist()
    again = learner(name, critic)
    again.load_state(tensors)
    again.submit(chosen)
    found = again.finish_update()
    again.close()
    assert found["value_mean"] == pytest.approx(np.mean(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "critic", "changed"),
    [
        ("qwen3_tied", OWN, {}),
        ("qwen3_untied", OWN, {"compute": "bfloat16"}),
        ("gpt2", POLICY, {"epochs": 2}),
        ("qwen3_tied", {"action": "turn", "lr": 1e-2}, {"epochs": 2, "updates_per_step": 2}),
        ("qwen3_tied", {"warmup": 2}, {"optimiser": "muon"}),
        ("qwen3_untied", OWN, {"cpu_offload": True, "gradient_checkpointing": True}),
        ("qwen3_tied", OWN, {"reference_kl": 0.1, "reference_kl_in": "reward"}),
    ],
)
def test_a_restart_and_any_number_of_workers_give_the_same_bits(name, critic, changed):
    """With two epochs an update is trained twice; a restart is between two steps."""
    updates = batches(4)
    if changed.get("epochs"):
        per_step = changed.get("updates_per_step", 1)
        steps = [updates[i : i + per_step] for i in range(0, 4, per_step)]
        updates = [one for step in steps for one in (*step, *step)]
    half = len(updates) // 2
    whole = trained(updates, name, critic, workers=3, **changed)
    first = trained(updates[:half], name, critic, **changed)
    second = learner(name, critic, **changed)
    second.load_state(first.state())
    train(second, updates[half:])
    second.close()
    assert second.state_hash() == whole.state_hash()


@pytest.mark.parametrize("critic", [OWN, POLICY], ids=["own", "policy"])
def test_a_version_holds_the_policy_alone(critic):
    made = trained(batches(1), critic=critic)
    plain = TorchLearner(build(), settings())
    plain.close()
    assert made.snapshot("float32").keys() == plain.snapshot("float32").keys()
    assert made.state_bytes > plain.state_bytes


@pytest.mark.parametrize("critic", [OWN, POLICY], ids=["own", "policy"])
def test_only_the_critic_learns_in_the_warm_up(critic):
    """Its updates count for the version and are not skipped; the policy's moments do not move."""
    made = learner(critic={**critic, "warmup": 2})
    begin = policy_state(made)
    first, second = train(made, batches(2))
    assert torch.equal(begin, made.flat)
    assert (made.version, first["updates_skipped"], first["learning_rate"]) == (2, 0, 0)
    assert first["gradient_norm"] == 0 < first["critic_gradient_norm"]
    assert first["value_mean"] == 0 != second["value_mean"]
    assert {"kl", "ess", "entropy"} <= first.keys()
    assert int(made.state()["optimiser.counters"][1]) == 0
    (third,) = train(made, batches(1, seed=4))
    made.close()
    assert not torch.equal(begin, made.flat)
    assert third["gradient_norm"] > 0


@pytest.mark.parametrize(
    "critic",
    [
        {"warmup": 80},
        pytest.param({**POLICY, "lr": 3e-2, "loss_weight": 1.0}, marks=pytest.mark.slow),
        pytest.param({"action": "turn", "warmup": 80}, marks=pytest.mark.slow),
    ],
    ids=["own", "policy", "turn"],
)
def test_values_come_to_explain_the_returns(critic):
    """The reward is in the first token of the prompt, so every value can know it."""
    updates = batches(1, size=12)
    made = learner(critic={**critic, "gae_lambda": 1.0}, steps=81)
    found = [train(made, updates)[0]["explained_variance"] for _ in range(80)]
    made.close()
    assert abs(found[0]) < 0.01, "all values are 0"
    assert found[-1] > 0.8


def test_a_body_that_the_value_loss_does_not_weigh_is_not_moved_by_it():
    """With `loss_weight` 0 the head alone learns: the policy is that of any critic with equal
    advantages, of which there is none yet at the first update.
    """
    updates = batches(1)
    free, held = (
        policy_state(trained(updates * 2, critic={**POLICY, "loss_weight": weight}))
        for weight in (1.0, 0.0)
    )
    own = policy_state(trained(updates, critic=OWN))
    first = policy_state(trained(updates, critic={**POLICY, "loss_weight": 0.0}))
    assert torch.equal(own, first)
    assert not torch.equal(free, held)


def test_further_epochs_repeat_the_advantages_of_the_first():
    """The return is made of the values of the first pass; without `epochs` a second step has other
    values, and so another return where λ < 1.
    """
    updates = batches(1)
    made = learner(epochs=3, critic={"gae_lambda": 0.5, "clip": 0.01})
    first, *again = train(made, updates * 3)
    (later,) = train(made, updates)
    made.close()
    assert [one["return_mean"] for one in again] == [first["return_mean"]] * 2
    assert later["return_mean"] != first["return_mean"]
    assert first["value_clipped"] == 0 < again[1]["value_clipped"]


def test_a_checkpoint_without_a_critic_starts_a_new_one():
    updates = batches(2)
    plain = TorchLearner(build(), settings(**{**GAE, "advantage": "grpo"}))
    train(plain, updates[:1])
    plain.close()
    made = learner()
    made.load_state(plain.state())
    (found,) = train(made, updates[1:])
    made.close()
    assert (found["value_mean"], made.updates) == (0, 2)
    assert found["critic_learning_rate"] == found["learning_rate"]


@pytest.mark.parametrize("critic", [OWN, POLICY], ids=["own", "policy"])
def test_adapters_have_a_critic_too(critic):
    """Of adapters: the base stays, in the critic as in the policy."""
    updates = batches(2)

    def adapted() -> TorchLearner:
        model = build()
        attach_adapters(model, LoraSettings(rank=2, alpha=4.0), 3, torch.float32, "base")
        return TorchLearner(model, settings(**GAE, critic=critic))

    whole, first, second = adapted(), adapted(), adapted()
    train(whole, updates)
    train(first, updates[:1])
    second.load_state(first.state())
    train(second, updates[1:])
    for one in (whole, first, second):
        one.close()
    assert second.state_hash() == whole.state_hash()
    own = [name for name in whole.state() if name.startswith("critic.masters.model.")]
    assert bool(own) == (critic == OWN)
    assert all("lora" in name for name in own)


def test_a_micro_batch_in_halves_has_the_same_critic(monkeypatch: pytest.MonkeyPatch):
    updates = batches(1)
    whole = trained(updates)
    halved = learner()
    compute = halved._compute

    def short(job: Any) -> Any:
        if len(job.samples) > 3:
            raise torch.OutOfMemoryError("short")
        return compute(job)

    monkeypatch.setattr(halved, "_compute", short)
    (found,) = train(halved, updates)
    halved.close()
    assert found["micro_batches_halved"] > 0
    near = {n: t for n, t in whole.state().items() if n.startswith("critic.mean")}
    for name, tensor in near.items():
        assert torch.allclose(halved.state()[name], tensor, atol=1e-6)


def rewards_of(found: Sequence[Sample], by_turn: bool) -> list[float]:
    return actions_of(found, by_turn).rewards.tolist()


def test_a_group_keeps_its_rewards_at_their_places():
    """Rewards of turns, and a whole one at the end; a group of one is trained, too."""
    records = [episode("a", DIALOGUE), episode("b", DIALOGUE)]
    noted = notes(a=[1.0, 2.0], b=[5.0])
    chosen = settings(advantage="gae", process_rewards=True, survivors_min=1)
    found = prepare_group(0, records, noted, training_rule(chosen, None, False), 0).samples
    assert rewards_of(found, by_turn=False) == [0, 0, 1, 0, 2, 0, 0, 0, 0, 5]
    assert rewards_of(found, by_turn=True) == [1, 2, 0, 5]
    assert [one.known_advantage for one in found] == [None, None]
    alone = prepare_group(0, records[:1], noted, training_rule(chosen, None, False), 0)
    assert alone.ending == ""


def test_a_reward_of_a_masked_token_is_that_of_the_trained_one_before():
    (one,) = prepare_group(
        0,
        [episode("a", DIALOGUE)],
        notes(a=[1.0, 2.0, 4.0, 8.0, 16.0]),
        training_rule(
            settings(advantage="gae", process_rewards=True, survivors_min=1), None, False
        ),
        0,
    ).samples
    masked = replace(one, mask=np.array([False, True, False, False, True]))
    assert rewards_of([masked], by_turn=False) == [14, 16]
    assert rewards_of([masked], by_turn=True) == [14, 16]
    middle = replace(one, mask=np.array([False, True, True, False, False]))
    assert rewards_of([middle], by_turn=True) == [30]
    assert isinstance(one.parts, PartRewards)


def test_ranks_refuse_a_critic_of_its_own():
    with pytest.raises(ConfigurationError, match="body must be 'policy'"):
        ShardedLearner(None, settings(**GAE))  # pyright: ignore[reportArgumentType]


def test_the_preset_is_a_configuration_that_needs_no_group(tmp_path: Path):
    path = tmp_path / "run.toml"
    alone = "samples_per_group = 1\nsurvivors_min = 1\n"
    path.write_text(f'run = "x"\n[trainer]\npreset = "ppo"\n{alone}')
    found = load(path).trainer
    assert (found.advantage, found.loss, found.clip_high) == ("gae", "ppo_clip", 0.2)
    path.write_text(f'run = "x"\n[trainer]\n{alone}')
    with pytest.raises(ConfigurationError, match="samples_per_group must be ≥ 2"):
        load(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("processes = 2", "body must be 'policy' with trainer.processes > 1"),
        ("critic.warmup = 60", "warmup must be < trainer.steps"),
        ("critic.body = 'shared'", "body must be one of 'own' or 'policy'"),
        ("critic.gamma = 1.5", "gamma must be ≤ 1"),
        ("lam = 0.9", "trainer.critic.gae_lambda"),
    ],
)
def test_what_a_critic_cannot_do_is_refused(line: str, problem: str, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(f'run = "x"\n[trainer]\npreset = "ppo"\n{line}\n')
    with pytest.raises(ConfigurationError, match=problem):
        load(path)


def test_invariant_14_a_release_without_a_critic_refuses_the_run(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore()
    read_or_create_identity(store, "x")
    record_configuration(store, Configuration(run="x"))
    assert CRITIC not in read_or_create_identity(store, "x").needs
    record_configuration(store, Configuration(run="x", trainer=TrainerSettings(advantage="gae")))
    assert CRITIC in read_or_create_identity(store, "x").needs
    older = KNOWN_FEATURES - {CRITIC}
    monkeypatch.setattr("rollstream.streams.release.missing_features.__defaults__", (older,))
    with pytest.raises(NewerRelease, match=CRITIC):
        read_or_create_identity(store, "x")


def drawn(model: Any, count: int, generator: torch.Generator, name: str) -> list[Sample]:
    """Answers of five tokens of the model to the prompt 0; even tokens are paid at their places."""
    tokens = torch.zeros(count, 1, dtype=torch.long)
    logprobs = torch.zeros(count, 0)
    for _ in range(5):
        with torch.no_grad():
            found = torch.log_softmax(model(input_ids=tokens).logits[:, -1], -1)
        chosen = torch.multinomial(found.exp(), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], 1)
        logprobs = torch.cat([logprobs, found.gather(1, chosen)], 1)
    paid = (tokens[:, 1:] % 2 == 0).double().numpy() / 5
    return [
        Sample(
            trajectory=f"{name}-{i}", group=i, tokens=tokens[i].numpy().astype(np.uint32),
            sources=np.array([PROMPT] + [GENERATED] * 5, np.uint8), logprobs=logprobs[i].numpy(),
            spans=(Span(0, 5, Version(0, 1)),), reward=float(paid[i].sum()), advantage=0.0,
            temperature=1.0, mask=np.ones(5, np.bool_),
            parts=PartRewards(5, np.arange(5), paid[i]), turn_ends=np.array([1, 4]),
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "critic",
    [
        {"lr": 1e-2},
        {**POLICY, "loss_weight": 0.5},
        pytest.param({"action": "turn", "lr": 1e-2}, marks=pytest.mark.slow),
    ],
    ids=["own", "policy", "turn"],
)
def test_the_policy_learns_what_is_paid(critic):
    """From half of it to nearly all; each answer is of a group of its own."""
    made = learner(critic=critic, steps=1000, lr_final=1.0, epochs=2)
    model, generator = build(), torch.Generator().manual_seed(1)
    rewards: list[float] = []
    for step in range(40):
        model.load_state_dict(made.snapshot("float32"))
        batch = drawn(model, 24, generator, str(step))
        rewards.append(float(np.mean([one.reward for one in batch])))
        train(made, [[batch]] * 2)
    made.close()
    assert rewards[0] < 0.6
    assert np.mean(rewards[-5:]) > 0.95, rewards
