"""One rank of `rank_memory`, a process of its own: `python -m benchmarks.sizes.rank_process FOLDER
NUMBER JOB…`, with `torchrun`'s variables in the environment. It writes FOLDER/NUMBER-RANK.json: the
memory once it had joined, and the peak of each job.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.base import Learner, open_learner
from rollstream.consumers.trainer.sharded.learner import ShardedModel
from rollstream.consumers.trainer.sharded.ranks import join_ranks
from rollstream.consumers.trainer.sharded.starting_model import StartingModel
from rollstream.storage.starting_model.manifest import read_model_manifest
from rollstream.storage.starting_model.models import load_empty_model
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.starting_model.rows import ModelRows
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import CheckpointId, open_checkpoint, write_checkpoint
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.records import GENERATED, PROMPT
from rollstream.streams.values import Span, Version

TOKENS, PROMPT_TOKENS = 64, 8
SAMPLE_S = 0.005
SHARD_BYTES = 64 << 20
SETTINGS = TrainerSettings(lr=1e-6, lr_ramp_steps=0, steps=100, gradient_checkpointing=True)
FIELDS = ("RssAnon:", "RssShmem:")


def private_bytes(process: int | str = "self") -> int:
    """Anonymous and shared memory of a process; pages of files, which the kernel may drop, do not
    count.
    """
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(FIELDS))


class PeakMemory:
    """Samples what `read` returns, by default this process's memory; `begin` names the job whose
    peak counts from then on.
    """

    def __init__(self, read: Callable[[], int] = private_bytes) -> None:
        self.peaks: dict[str, int] = {}
        self._read = read
        self.joined = read()
        self._job = "load"
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, job: str) -> None:
        self._job = job

    def _run(self) -> None:
        while True:
            job = self._job
            self.peaks[job] = max(self.peaks.get(job, 0), self._read())
            time.sleep(SAMPLE_S)


class RankJobs:
    """The jobs in their order, which all ranks do; rank 0 leads."""

    def __init__(self, folder: Path, learner: Learner, leads: bool) -> None:
        self._store = open_store(f"file:{folder / 'store'}")
        self._learner, self._leads = learner, leads
        self._version = 0

    def do(self, job: str) -> None:
        jobs: dict[str, Callable[[], None]] = {
            "train": self._train, "publish": self._publish, "keep": self._keep,
            "resume": self._resume, "load": lambda: None,
        }  # fmt: skip
        jobs[job]()

    def _train(self) -> None:
        for batch in range(4):
            self._learner.submit([_sample(batch)])
        self._learner.finish_update()

    def _publish(self) -> None:
        tensors = self._learner.snapshot("bfloat16")
        version = Version(self._version, 1)
        new = NewVersion("run", version, tensors, {}, SHARD_BYTES, 0.0, self._leads)
        publish_version(self._store, new)
        self._version += 1

    def _keep(self) -> None:
        write_checkpoint(self._store, 1, 1, self._learner.state(), {} if self._leads else None)

    def _resume(self) -> None:
        self._learner.load_state(open_checkpoint(self._store, CheckpointId(1, 1)).tensors)


def _sample(number: int) -> Sample:
    draw, generated = np.random.default_rng(number), TOKENS - PROMPT_TOKENS
    return Sample(
        trajectory=f"t{number}",
        group=0,
        tokens=draw.integers(0, 1000, TOKENS).astype(np.uint32),
        sources=np.repeat(np.array([PROMPT, GENERATED], np.uint8), [PROMPT_TOKENS, generated]),
        logprobs=np.full(generated, -9.0, np.float32),
        spans=(Span(0, generated, Version(0, 1)),),
        reward=1.0,
        advantage=1.0,
        temperature=1.0,
        mask=np.ones(generated, np.bool_),
    )


def starting(folder: Path, rank: int) -> tuple[StartingModel, StoredModel]:
    """The model in the run's store, of which this rank will read its own rows."""
    store = open_store(f"file:{folder / 'store'}")
    manifest = read_model_manifest(store)
    assert manifest is not None
    stored = StoredModel(store, manifest)
    cache = stored.host_folder("", None, folder / f"host-{rank}")
    found = load_empty_model(str(cache), ModelRows(stored))
    assert found is not None
    return StartingModel(*found), stored


def main(folder: Path, number: str, jobs: Sequence[str]) -> None:
    with join_ranks("cpu", 600.0) as ranks:
        memory = PeakMemory()
        start, stored = starting(folder, ranks.rank)
        learner = open_learner(ShardedModel(start, ranks), SETTINGS)
        rank_jobs = RankJobs(folder, learner, ranks.rank == 0)
        for job in jobs:
            memory.begin(job)
            rank_jobs.do(job)
        found = {"joined": memory.joined, "peaks": memory.peaks, "read": stored.store_bytes}
        (folder / f"{number}-{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
