"""Several ranks learn the same as one process, write it from all ranks at once, and any number of
ranks resumes from there; an error names a rank that was killed.
"""

import shutil
from pathlib import Path

import pytest
import torch

from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.storage.starting_model import manifest as manifests
from rollstream.storage.starting_model.manifest import ModelSource
from rollstream.storage.starting_model.put import put_model
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import CheckpointId, read_checkpoint
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.values import Version
from testbed.waiting import WAIT_S, wait_for
from tests.trainer.learning_reference import (
    assert_equal_but_for,
    build,
    largest_difference,
)
from tests.trainer.sharded.sharded_process import COUNTS, MODEL, rules, stream
from tests.trainer.sharded.sharded_ranks import found, rank_output, ranks, run_ranks

LAST = len(COUNTS) - 1
JOBS = ["train:0-3", "publish:0", "keep:4", f"train:4-{LAST}", "publish:1", f"keep:{LAST + 1}"]


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory):
    """Two processes that have done the jobs; they continue training once FOLDER/go exists."""
    folder = tmp_path_factory.mktemp("two")
    more = ["write_result:", "until:go", *[f"train:0-{LAST}"] * 300]
    with ranks(folder, 2, [*JOBS, *more]) as started:
        wait_for(lambda: (folder / "result.json").exists() or has_ended(started))
        assert not has_ended(started), rank_output(folder, 0) + rank_output(folder, 1)
        yield folder, started


def has_ended(started) -> bool:
    return any(process.poll() is not None for process in started)


@pytest.fixture(scope="module")
def two(living):
    folder, _ = living
    return folder, found(folder)


@pytest.fixture(scope="module")
def alone():
    """One process: its metrics by update, and its state after the fourth and the last one."""
    learner = TorchLearner(build(MODEL), rules())
    metrics, states, counted = [], {}, []
    for update in range(len(COUNTS)):
        for batch in stream(update):
            learner.submit(batch)
        metrics.append(learner.finish_update())
        counted.append(learner.micro_batches)
        states[update + 1] = learner.state()
    learner.close()
    return metrics, states, counted


def kept(folder: Path, step: int) -> dict[str, torch.Tensor]:
    store = open_store(f"file:{folder / 'store'}")
    return dict(read_checkpoint(store, CheckpointId(1, step)).tensors)


def masters(state) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("masters.")}


def test_two_ranks_learn_what_one_process_learns(two, alone):
    folder, _ = two
    _, states, _ = alone
    for step in (4, LAST + 1):
        state = kept(folder, step)
        assert state.keys() == states[step].keys()
        assert torch.equal(state["optimiser.counters"], states[step]["optimiser.counters"])
        assert largest_difference(state, states[step]) < 1e-5
    moved = largest_difference(masters(states[4]), masters(states[LAST + 1]))
    assert moved > 1e-3, "nothing was learnt that could differ"


def test_metrics_are_those_of_all_ranks_together(two, alone):
    _, result = two
    metrics, _, counted = alone
    assert result["micro_batches"] == counted
    for ours, theirs in zip(result["metrics"], metrics, strict=True):
        assert ours.keys() == theirs.keys()
        named = {name for name in ours if name != "busy_s"}
        for name in named:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_an_update_without_trained_tokens_moves_nothing_and_hangs_no_rank(two):
    _, result = two
    skipped = [one["updates_skipped"] for one in result["metrics"]]
    assert skipped == [float(count == 0) for count in COUNTS]


def test_a_version_is_the_masters_and_was_written_by_every_rank(two):
    folder, _ = two
    store = open_store(f"file:{folder / 'store'}")
    for number, step, kind in ((0, 4, "anchor"), (1, LAST + 1, "delta")):
        manifest, problem = verify_version(store, Version(number, 1))
        assert problem == ""
        assert manifest.kind == kind  # pyright: ignore[reportOptionalMemberAccess]
        ranks = {file.name.split("-")[1] for file in manifest.files if "rank" in file.name}  # pyright: ignore[reportOptionalMemberAccess]
        assert ranks == {"rank0", "rank1"}
        held = ResidentWeights()
        held.update(store, Version(number, 1))
        for name, master in masters(kept(folder, step)).items():
            assert torch.equal(held.tensors[name.removeprefix("masters.")], master.bfloat16())
        assert held.tensors.keys() == build(MODEL).state_dict().keys()


def test_an_anchor_of_several_ranks_is_a_checkpoint_for_transformers(two):
    folder, _ = two
    store = open_store(f"file:{folder / 'store'}")
    manifest = read_manifest(store, Version(0, 1))
    index = store.get("weights/v00000000-t0001/model.safetensors.index.json").decode()
    assert all(entry.file in index for entry in manifest.weights.tensors.values())


@pytest.mark.long
def test_the_same_number_of_ranks_resumes_bit_for_bit(two, tmp_path):
    folder, result = two
    again = run_ranks(copied(folder, tmp_path), 2, ["resume:4", f"train:4-{LAST}"])
    assert again["hashes"] == result["hashes"][3:]


@pytest.mark.parametrize(
    "size",
    [pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.slow)],
)
def test_another_number_of_ranks_resumes_up_to_rounding(two, alone, tmp_path, size):
    _, states, _ = alone
    folder = copied(two[0], tmp_path)
    run_ranks(folder, size, ["resume:4", f"train:4-{LAST}", "keep:99"])
    state = kept(folder, 99)
    assert state.keys() == states[LAST + 1].keys()
    assert largest_difference(state, states[LAST + 1]) < 1e-5


def test_one_process_resumes_from_two_ranks(two, alone):
    _, states, _ = alone
    learner = TorchLearner(build(MODEL), rules())
    learner.load_state(kept(two[0], 4))
    for update in range(4, len(COUNTS)):
        for batch in stream(update):
            learner.submit(batch)
        learner.finish_update()
    learner.close()
    assert largest_difference(learner.state(), states[LAST + 1]) < 1e-5


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(2, 4, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_a_resume_on_other_ranks_has_the_same_losses(before, after, tmp_path):
    """The checkpoint of one process has whole tensors, as that of earlier releases."""
    own, again = f"train:4-{LAST}", ["resume:4", f"train:4-{LAST}"]
    first = run_ranks(tmp_path / "first", before, ["train:0-3", "keep:4", own])
    second = run_ranks(copied(tmp_path / "first", tmp_path / "second"), after, again)
    assert first["hashes"][3] != first["hashes"][-1]
    for ours, theirs in zip(second["metrics"], first["metrics"][4:], strict=True):
        for name in ("loss", "gradient_norm", "learning_rate", "updates_skipped"):
            assert ours.get(name) == pytest.approx(theirs.get(name), rel=1e-5, abs=1e-6), name


ENLARGED = {"llama_scaled_rope": 10}  # seen: 3, on one of two processors


@pytest.mark.parametrize("name", [MODEL, pytest.param("llama_scaled_rope", marks=pytest.mark.long)])
def test_ranks_that_read_their_rows_of_a_checkpoint_learn_what_one_process_learns(tmp_path, name):
    build(name).save_pretrained(tmp_path / name)
    run_ranks(tmp_path, 3, [f"model={name}", "train:0-3", "publish:0", "keep:4"])
    learner = TorchLearner(build(name), rules())
    for update in range(4):
        for batch in stream(update):
            learner.submit(batch)
        learner.finish_update()
    learner.close()
    assert_equal_but_for(ENLARGED.get(name, 0), kept(tmp_path, 4), learner.state())
    held = ResidentWeights()
    held.update(open_store(f"file:{tmp_path / 'store'}"), Version(0, 1))
    assert held.tensors.keys() == build(name).state_dict().keys()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("gpt2", marks=pytest.mark.slow),
        pytest.param("llama_scaled_rope", marks=pytest.mark.long),
    ],
)
def test_models_without_and_with_ties_and_recomputed_layers(tmp_path, model):
    run_ranks(tmp_path, 3, [f"model={model}", "train:0-3", "keep:1"], gradient_checkpointing=True)
    learner = TorchLearner(build(model), rules())
    for update in range(4):
        for batch in stream(update):
            learner.submit(batch)
        learner.finish_update()
    learner.close()
    ours, theirs = kept(tmp_path, 1), learner.state()
    assert ours.keys() == theirs.keys()
    # Biases of keys have no gradient but rounding (softmax does not see them), which Adam enlarges.
    compared = [name for name in ours if "c_attn.bias" not in name]
    ours, theirs = ({n: state[n] for n in compared} for state in (ours, theirs))
    assert_equal_but_for(ENLARGED.get(model, 0), ours, theirs)


def test_each_rank_reads_only_its_rows_of_a_model_in_the_store(two, tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "BLOCK_BYTES", 512)  # several blocks in each rank's rows
    build(MODEL).save_pretrained(tmp_path / "elsewhere")
    store = open_store(f"file:{tmp_path / 'starting'}")
    put = put_model(store, "run", ModelSource(tmp_path / "elsewhere"), 0.0)
    shutil.rmtree(tmp_path / "elsewhere")
    run_ranks(tmp_path, 2, ["train:0-3", "publish:0", "keep:4"])
    before, after = kept(two[0], 4), kept(tmp_path, 4)
    assert all(torch.equal(before[name], after[name]) for name in before)
    weights = sum(tensor.end - tensor.start for tensor in put.tensors.values())
    small = put.bytes - sum(e.bytes for e in put.files if e.name.endswith(".safetensors"))
    for rank in range(2):
        read = int((tmp_path / f"read-{rank}").read_text()) - small
        assert read < 0.56 * weights, (read, weights)


@pytest.mark.long
def test_offloaded_slices_and_recomputed_layers_give_the_same_bits(two, tmp_path):
    build(MODEL).save_pretrained(tmp_path / MODEL)  # read by rows
    changed = {"cpu_offload": True, "gradient_checkpointing": True}
    run_ranks(tmp_path, 2, [f"model={MODEL}", "train:0-3", "publish:0", "keep:4"], **changed)
    before, after = kept(two[0], 4), kept(tmp_path, 4)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_compiled_layers_and_joined_sequences_learn_nearly_the_same(two, tmp_path):
    run_ranks(tmp_path, 2, ["train:0-3", "keep:4"], compile=True, varlen_attention=True)
    assert largest_difference(kept(tmp_path, 4), kept(two[0], 4)) < 1e-4


@pytest.mark.slow
def test_layers_in_bfloat16_learn_nearly_the_same_on_fp32_masters(tmp_path, alone):
    exact, _, _ = alone
    result = run_ranks(tmp_path, 2, ["train:0-3", "keep:1"], compute="bfloat16")
    state = kept(tmp_path, 1)
    assert {tensor.dtype for tensor in masters(state).values()} == {torch.float32}
    rounded = any(not torch.equal(t, t.bfloat16().float()) for t in masters(state).values())
    assert rounded, "the masters were rounded"
    for ours, theirs in zip(result["metrics"], exact, strict=False):
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=0.2)
    assert result["metrics"][0]["gradient_norm"] != pytest.approx(
        exact[0]["gradient_norm"], rel=1e-6
    ), "nothing was computed in bfloat16"


def test_a_killed_rank_is_named_while_others_train(living):
    """The last test here: both processes have ended then."""
    folder, (first, second) = living
    (folder / "go").touch()
    wait_for(lambda: "continues" in rank_output(folder, 0))
    second.kill()
    assert first.wait(WAIT_S) != 0
    assert "RankLost: rank 1 of the trainer is gone" in rank_output(folder, 0)


def copied(folder: Path, to: Path) -> Path:
    """The same checkpoints in a store of its own."""
    shutil.copytree(folder / "store", to / "store")
    return to


@pytest.mark.parametrize("where", ["loss", pytest.param("reward", marks=pytest.mark.slow)])
def test_two_ranks_learn_the_head_of_a_critic_that_one_process_learns(tmp_path, where):
    """On the policy's body; a warm-up of one step, then both learn. Ranks resume from it, and a
    version has none of it. The KL to the reference of scorers is in the loss or in the reward.
    """
    critic = {"body": "policy", "warmup": 1, "lr": 1e-2, "loss_weight": 0.5}
    given = {"advantage": "gae", "loss": "ppo_clip", "critic": critic, "reference_kl_in": where}
    jobs = ["train:0-3", "publish:0", "keep:4", f"train:4-{LAST}", f"keep:{LAST + 1}"]
    whole = run_ranks(tmp_path / "two", 2, jobs, **given)
    learner = TorchLearner(build(MODEL), rules(**given))
    metrics = []
    for update in range(len(COUNTS)):
        for batch in stream(update):
            learner.submit(batch)
        metrics.append(learner.finish_update())
    learner.close()
    for ours, theirs in zip(whole["metrics"], metrics, strict=True):
        assert ours.keys() - {"busy_s"} == theirs.keys() - {"busy_s"}
        for name in ("value_loss", "value_mean", "critic_gradient_norm", "gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert metrics[0]["gradient_norm"] == 0 < metrics[1]["gradient_norm"]
    state, alone = kept(tmp_path / "two", LAST + 1), learner.state()
    assert state.keys() == alone.keys()
    head = {name: one for name, one in alone.items() if name.startswith("critic.masters.")}
    assert largest_difference({name: state[name] for name in head}, head) < 1e-4
    assert not [name for name in learner.snapshot("float32") if "value" in name]
    shutil.copytree(tmp_path / "two", tmp_path / "again")
    again = run_ranks(tmp_path / "again", 2, ["resume:4", f"train:4-{LAST}"], **given)
    assert again["hashes"] == whole["hashes"][3:]
