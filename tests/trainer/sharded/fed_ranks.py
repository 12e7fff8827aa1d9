"""A trainer of two ranks over a log that a test has fed (`HandFed`): `python -m
tests.trainer.sharded.fed_ranks FOLDER TERMS_MAX PLAN`. Starts both ranks, as forks of this process,
under one term after the other until one completes the run, and prints the number of terms.

`PLAN` is JSON: memory runs out on each of its `ranks` that trains more than `most` samples in one
pass, or a sample of group `broken`, while the other ranks are in that pass's collectives.
"""

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.build import (
    InitialModel,
    Provenance,
    TrainerPlan,
    build_trainer,
)
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.sharded.follower import build_follower
from rollstream.consumers.trainer.sharded.learner import ShardedModel
from rollstream.consumers.trainer.sharded.ranks import join_ranks
from rollstream.consumers.trainer.sharded.shard import Shard
from rollstream.consumers.trainer.sharded.starting_model import StartingModel
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.settings import CheckpointSettings, WeightsSettings
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from testbed.servers import free_ports
from tests.trainer.learning_reference import build

SIZE = 2


def plant(plan: dict[str, Any], rank: int) -> None:
    """Let memory run out on this rank."""
    train = Shard.train

    def tight(self: Shard, samples: Sequence[Sample], version: int, counts: bool) -> None:
        is_broken = any(sample.group == plan.get("broken") for sample in samples)
        if counts and (len(samples) > plan.get("most", len(samples)) or is_broken):
            raise torch.OutOfMemoryError("planted")
        train(self, samples, version, counts)

    if rank in plan["ranks"]:
        Shard.train = tight


def run_rank(folder: Path, term: int, plan: dict[str, Any]) -> None:
    """One rank, until the run is complete."""
    settings = TrainerSettings.model_validate(plan["settings"])
    rule = training_rule(settings, None, False)
    bus, store = open_bus(f"sqlite:{folder / 'bus'}"), open_store(f"file:{folder / 'store'}")
    with join_ranks("cpu", 60.0) as ranks:
        plant(plan, ranks.rank)
        initial = InitialModel(ShardedModel(StartingModel(build()), ranks), {}, ranks, "model")
        trainer_plan = TrainerPlan(settings, rule, WeightsSettings(), CheckpointSettings())
        if ranks.rank:
            loop = build_follower(bus, store, trainer_plan, initial, "hand", lambda: None)
            assert loop is not None
            assert loop.run(loop.take_feeder.ledger.ended)
        else:
            provenance = Provenance("hand", term, "configuration", "revision")
            metrics = MetricsFile(folder / f"trainer-{term}.jsonl")
            trainer = build_trainer(bus, store, trainer_plan, initial, provenance, metrics)
            with ranks.recording(trainer.take_feeder.append_failures):
                assert trainer.run(threading.Event())


def started(folder: Path, term: int, plan: dict[str, Any], rank: int, port: int) -> int:
    """Returns the process id of a rank."""
    if child := os.fork():
        return child
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    code = 1
    try:
        torch.set_num_threads(1)
        run_rank(folder, term, plan)
        code = 0
    except BaseException:  # noqa: BLE001  a fork must not continue in the loop of `main`
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path, terms_max: int, plan: dict[str, Any]) -> None:
    for term in range(1, terms_max + 1):
        (port,) = free_ports(1)
        children = [started(folder, term, plan, rank, port) for rank in range(SIZE)]
        ended = [os.waitpid(child, 0)[1] for child in children]
        if not any(ended):
            print(term)
            return
    sys.exit(f"not complete after {terms_max} terms")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
