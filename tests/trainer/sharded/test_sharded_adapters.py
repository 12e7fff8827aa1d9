"""Several ranks train an adapter as one process does: equal versions up to rounding, over one base,
and any number of ranks resumes from a checkpoint.
"""

import shutil
from pathlib import Path

import pytest
import torch

from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.masters import BASE_HASH
from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.lora import PREFIX, base_state
from rollstream.storage.settings import LoraSettings
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.adapters import BASE, AdapterTensors, publish_base
from rollstream.storage.weights.checkpoints import CheckpointId, open_checkpoint, read_checkpoint
from rollstream.storage.weights.fetch import export_version, fetch_tensors
from rollstream.storage.weights.manifest import TensorFiles, read_manifest
from rollstream.storage.weights.shards import StoredTensors
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from tests.trainer.learning_reference import build, largest_difference
from tests.trainer.sharded.sharded_process import COUNTS, MODEL, rules, stream, with_adapters
from tests.trainer.sharded.sharded_ranks import run_ranks

LAST = len(COUNTS) - 1
LORA = LoraSettings(rank=3)
JOBS = ["lora=3", "train:0-3", "publish:0", "keep:4", f"train:4-{LAST}", "publish:1", "keep:8"]


def store_of(folder: Path):
    return open_store(f"file:{folder / 'store'}")


def kept(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(store_of(folder), CheckpointId(1, step)).tensors)


def read_checkpoint_files(folder: Path, step: int) -> TensorFiles:
    tensors = open_checkpoint(store_of(folder), CheckpointId(1, step)).tensors
    assert isinstance(tensors, StoredTensors)
    return tensors.files


def learner_of(name: str = MODEL, lora: LoraSettings = LORA, **changed: object) -> TorchLearner:
    return TorchLearner(with_adapters(build(name), lora), rules(**changed))


def train(learner: TorchLearner, first: int, last: int) -> list[dict[str, float]]:
    metrics: list[dict[str, float]] = []
    for update in range(first, last + 1):
        for batch in stream(update):
            learner.submit(batch)
        metrics.append(learner.finish_update())
    return metrics


@pytest.fixture(scope="module")
def alone():
    """One process: its state and its version after the fourth and the last update."""
    learner, states, versions = learner_of(), {}, {}
    for first, last in ((0, 3), (4, LAST)):
        train(learner, first, last)
        states[last + 1], versions[last + 1] = learner.state(), learner.snapshot("bfloat16")
    learner.close()
    return states, versions


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory):
    """Two ranks, which read their rows of the base from files."""
    folder = tmp_path_factory.mktemp("two")
    build(MODEL).save_pretrained(folder / MODEL)
    return folder, run_ranks(folder, 2, JOBS)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Over masters and moments; the counters and the base's hash are equal."""
    assert found.keys() == expected.keys()
    for name in (BASE_HASH, "optimiser.counters"):
        assert torch.equal(found[name], expected[name])
    told = [name for name in found if "lora_" in name]
    return largest_difference({n: found[n] for n in told}, {n: expected[n] for n in told})


def test_two_ranks_train_the_adapter_that_one_process_trains(two, alone):
    states, _ = alone
    for step in (4, LAST + 1):
        assert difference(kept(two[0], step), states[step]) < 1e-6
    moved = largest_difference(states[4], states[LAST + 1])
    assert moved > 1e-3, "nothing was learnt that could differ"


def test_a_rank_holds_its_rows_of_factors_and_moments(two):
    files = read_checkpoint_files(two[0], 4)
    rows = {name for name in files.tensors if "q_proj.lora_A" in name and "masters" in name}
    assert {name.rpartition("[")[2] for name in rows} == {"0:2]", "2:3]"}
    assert {file.name.split("-")[1] for file in files.files} == {"rank0", "rank1"}
    single = {name for name in files.tensors if "lora_" not in name}
    assert single == {BASE_HASH, "optimiser.counters"}, "the base has no state"


def test_a_version_is_a_peft_folder_over_the_base_of_one_process(two, alone):
    folder, versions = two[0], alone[1]
    store = store_of(folder)
    for number, step in ((0, 4), (1, LAST + 1)):
        manifest, problem = verify_version(store, Version(number, 1))
        assert manifest is not None, problem
        assert (manifest.kind, manifest.anchor) == ("adapter", BASE)
        names = {file.name for file in manifest.files}
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
        found, one = fetch_tensors(store, Version(number, 1))[1], versions[step]
        masters = kept(folder, step)
        for name, tensor in found.items():
            exact = masters["masters." + name.removeprefix(PREFIX)]
            assert torch.equal(tensor, exact.bfloat16())
            torch.testing.assert_close(tensor, one[name], atol=1e-6, rtol=2**-7)  # one rounding
        assert found.keys() == one.keys()
    base = read_manifest(store, BASE)
    alone = publish_base(MemoryStore(), "run", versions[4].base(), {}, 8192, 0.0)
    assert len(base.weights.files) > 2
    assert alone == base, "its files are not those of one process"


def test_peft_loads_the_exported_adapter(two, tmp_path):
    import peft  # seconds

    exported = export_version(store_of(two[0]), Version(1, 1), tmp_path, 1 << 30, merged=False)
    plain, model = build(MODEL), with_adapters(build(MODEL), LORA)
    plain.load_state_dict(base_state(model.state_dict()))  # rounded as the base
    found = fetch_tensors(store_of(two[0]), Version(1, 1))[1]
    for name, tensor in found.items():
        model.get_parameter(name.removeprefix(PREFIX)).data.copy_(tensor)
    loaded = peft.PeftModel.from_pretrained(plain, str(exported.folder))
    tokens = torch.tensor([[1, 5, 2, 9, 3]])
    with torch.inference_mode():
        ours, theirs = model(tokens).logits, loaded(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_one_process_resumes_from_two_ranks_over_the_same_base_only(two, alone):
    learner = learner_of()
    learner.load_state(kept(two[0], 4))
    train(learner, 4, LAST)
    assert difference(learner.state(), alone[0][LAST + 1]) < 1e-6
    learner.close()
    other = learner_of("qwen3_untied")
    with pytest.raises(ConfigurationError, match="another base model"):
        other.load_state(kept(two[0], 4))
    other.close()


@pytest.mark.parametrize(
    "size",
    [pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.slow)],
)
def test_another_number_of_ranks_resumes(two, alone, tmp_path, size):
    """The model is loaded whole here: the base has the same hash."""
    shutil.copytree(two[0] / "store", tmp_path / "store")
    jobs = ["lora=3", "resume:4", f"train:4-{LAST}", "keep:99"]
    run_ranks(tmp_path, size, jobs)
    assert difference(kept(tmp_path, 99), alone[0][LAST + 1]) < 1e-6


@pytest.mark.long
def test_offloaded_and_recomputed_layers_give_the_same_bits(two, tmp_path):
    build(MODEL).save_pretrained(tmp_path / MODEL)
    changed = {"cpu_offload": True, "gradient_checkpointing": True}
    run_ranks(tmp_path, 2, ["lora=3", "train:0-3", "keep:4"], **changed)
    before, after = kept(two[0], 4), kept(tmp_path, 4)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_layers_in_bfloat16_train_nearly_the_same_on_fp32_factors(tmp_path):
    build(MODEL).save_pretrained(tmp_path / MODEL)
    result = run_ranks(
        tmp_path, 2, ["lora=3", "train:0-3", "publish:0", "keep:4"], compute="bfloat16"
    )
    state = kept(tmp_path, 4)
    low = state["masters.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert low.dtype == torch.float32
    assert not torch.equal(low, low.bfloat16().float()), "the masters were rounded"
    learner = learner_of(compute="bfloat16")
    metrics = train(learner, 0, 3)
    for ours, theirs in zip(result["metrics"], metrics, strict=True):
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=0.05)
    one = learner.snapshot("bfloat16")
    assert isinstance(one, AdapterTensors)
    store = store_of(tmp_path)
    assert publish_base(store, "run", one.base(), {}, 1 << 30, 0.0) == read_manifest(store, BASE)
    learner.close()
