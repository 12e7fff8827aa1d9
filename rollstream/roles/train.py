"""Runs the trainer as a role: builds a `Trainer` from the starting model, the settings and the
role's context. With several processes rank 0 holds the role and the other ranks follow its ledger.

Environment variables, which `rollstream train` or `torchrun` sets, state that there are several
processes. Without them there is one, and nothing of the sharded trainer is imported.
"""

import json
import logging
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from rollstream.config.config import accept_change, fingerprint, store_configuration, truncates_log
from rollstream.config.identity import read_or_create_identity, record_configuration
from rollstream.config.run_folder import RunFolder, model_folder
from rollstream.config.settings import Configuration
from rollstream.consumers.trainer.build import InitialModel, Provenance, TrainerPlan, build_trainer
from rollstream.consumers.trainer.learn.forward import device_of
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.ledger import missing_lines
from rollstream.consumers.trainer.sharded.rank_plan import is_launched
from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Task
from rollstream.revision import code_revision
from rollstream.roles.context import RoleContext, run_rule, set_torch_threads
from rollstream.roles.roles import hold_role_lease, with_relay_push
from rollstream.storage.lora import attach_adapters
from rollstream.storage.metrics_file import MetricsFile, read_metrics
from rollstream.storage.models import load_empty_model, load_model
from rollstream.supervisor.train_group import threads_per_rank

if TYPE_CHECKING:
    from rollstream.consumers.trainer.sharded.ranks import Ranks
    from rollstream.consumers.trainer.sharded.starting_model import StartingModel


log = logging.getLogger(__name__)

PACED_LEARNER = "paced"


def run_train(context: RoleContext) -> bool:
    """Train until the last step, as the only process, as rank 0, or as a rank that follows rank 0.
    Returns True when the run is complete.
    """
    with join_rank_group(context) as ranks:
        if ranks is not None and ranks.rank:
            return follow_rank_0(context, ranks)
        with hold_role_lease(context, "trainer", context.configuration.trainer.lease_s) as lease:
            return train(with_relay_push(context), lease.term, ranks)


def starting_model(configuration: Configuration, folder: Path) -> PreTrainedModel | PacedModel:
    """Returns the weights of version 0, with the adapters to train if the run trains adapters: the
    model in the run's folder or, under `trainer.learner = "paced"`, drawn weights of the configured
    size, which are changed but not trained.
    """
    c = configuration
    if c.trainer.learner != PACED_LEARNER:
        return _with_adapters(load_model(str(model_folder(c, folder))), c)
    return PacedModel(
        seed=c.seed,
        weights_bytes=c.paced.weights_bytes,
        changed_share=c.paced.changed_share,
        step_s=c.paced.train_step_s / c.paced.time_scale,
        token_s=c.paced.train_token_s / c.paced.time_scale,
    )


def _with_adapters(model: PreTrainedModel, c: Configuration) -> PreTrainedModel:
    if c.model.lora.rank:
        dtype: torch.dtype = getattr(torch, c.weights.dtype)
        attach_adapters(model, c.model.lora, c.seed, dtype, c.model.path or f"{c.run}/model")
    return model


def make_paced_folder(task: Task, folder: Path) -> None:
    """Write the model folder of a paced run: the size of its vocabulary and its tokenizer, which
    every version carries. The write is atomic; an existing folder is kept.
    """
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = task.tokenizer()
    tokenizer.save(partial)
    fields = {"model_type": PACED_LEARNER, "vocab_size": tokenizer.size}
    (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.rename(partial, folder)


def shared_starting_model(configuration: Configuration, folder: Path) -> "StartingModel":
    """Returns the weights of version 0 for several ranks, each of which reads only its own rows. A
    rank reads all rows if the checkpoint names its tensors differently from the model.
    """
    from rollstream.consumers.trainer.sharded.starting_model import StartingModel

    path = str(model_folder(configuration, folder))
    empty = load_empty_model(path)
    if empty is not None:
        return StartingModel(_with_adapters(empty[0], configuration), empty[1])
    log.warning("model.path: %s is loaded whole by every rank: its names are converted", path)
    return StartingModel(_with_adapters(load_model(path), configuration))


@contextmanager
def join_rank_group(context: RoleContext) -> Generator["Ranks | None"]:
    """Connect all ranks while the block runs; they end together. Yields None if this is the only
    process.
    """
    if not is_launched():
        yield None
        return
    from rollstream.consumers.trainer.sharded.ranks import join_ranks

    settings = context.configuration.trainer
    if settings.learner == PACED_LEARNER:
        raise ConfigurationError(
            'trainer.learner = "paced" must run as one process: it has no model to share; '
            "start it without torchrun"
        )
    with join_ranks(device_of(settings.device).type, settings.ranks_timeout_s) as ranks:
        yield ranks


def follow_rank_0(context: RoleContext, ranks: "Ranks") -> bool:
    """Train the micro-batches that rank 0 takes, as another rank of the same model. Returns True
    when the run is complete.
    """
    from rollstream.consumers.trainer.sharded.follower import build_follower

    c = context.configuration
    set_torch_threads(threads_per_rank(c.trainer))
    plan, initial = trainer_plan(context), initial_model(context, ranks)
    store = with_relay_push(context).store
    loop = build_follower(context.bus, store, plan, initial, c.run, context.stop.is_set)
    if loop is None:
        return False
    context.watch.offer(loop.metric_values, lambda: [loop.take_feeder.ledger.reader])
    return loop.run(context.watch.turn_by(loop.ended))


SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
SMALL_BYTES_MAX = 64 << 20  # the largest tokenizers have 35 MB


def trainer_plan(context: RoleContext) -> TrainerPlan:
    """Returns the settings that the run's trainer follows at every rank."""
    c = context.configuration
    archived = c.archive.topics if c.archive.enabled else ()
    rule = run_rule(c, context.folder)
    return TrainerPlan(c.trainer, rule, c.weights, c.checkpoints, truncates_log(c), archived)


def initial_model(context: RoleContext, ranks: "Ranks | None" = None) -> InitialModel:
    """Returns the model that the run starts from; with `ranks` it is one that all ranks train
    together.
    """
    c, folder = context.configuration, context.folder
    files = config_and_tokenizer_files(model_folder(c, folder))
    if ranks is None:
        return InitialModel(starting_model(c, folder), files)
    from rollstream.consumers.trainer.sharded.learner import ShardedModel
    from rollstream.consumers.trainer.sharded.starting_model import model_hash

    start = shared_starting_model(c, folder)
    return InitialModel(ShardedModel(start, ranks), files, ranks, model_hash(start))


def train(context: RoleContext, term: int, ranks: "Ranks | None" = None) -> bool:
    """Train to the run's last step, with the other `ranks` if there are any. Returns True when the
    run is complete. Raises `ConfigurationError` if the run had another configuration, unless
    `context.accept_config` is set.
    """
    c = context.configuration
    store_configuration(context.store, c)
    accept = partial(accept_change, context.store, c, context.accept_config)
    set_torch_threads(threads_per_rank(c.trainer))
    lines = RunFolder(context.folder).metrics / "trainer.jsonl"
    initial = initial_model(context, ranks)
    with MetricsFile(lines) as metrics:
        trainer = build_trainer(
            context.bus,
            context.store,
            trainer_plan(context),
            initial,
            Provenance(
                c.run,
                term,
                fingerprint(c),
                code_revision(),
                accept,
                read_or_create_identity(context.store, c.run).id,
            ),
            metrics,
        )
        record_configuration(context.store, c)
        for line in missing_lines(trainer.recorded.done, read_metrics(lines)):
            metrics.append(line)
        context.watch.offer(trainer.metric_values, trainer.readers)
        return trainer.run(context.stop)


def config_and_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of the configuration and tokenizer files of a model's folder by file
    name; every version carries them beside its weights. Folders from the Hub also contain other
    files (weights in other formats, pictures), which are left out.
    """
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in SMALL_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= SMALL_BYTES_MAX
    }
