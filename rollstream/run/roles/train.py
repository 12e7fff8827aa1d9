"""Runs the trainer as a role. Several ranks may train one model: `rollstream train` or `torchrun`
then sets `rank_plan.VARIABLES`; rank 0 holds the lease and appends to the ledger; the others train
the same takes. One process imports nothing of `consumers/trainer/sharded/` but `rank_plan.py`.
"""

import json
import logging
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollstream.consumers.trainer.build import InitialModel, Provenance, TrainerPlan, build_trainer
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.rank_plan import is_launched
from rollstream.consumers.trainer.totals import missing_lines
from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Task
from rollstream.revision import code_revision
from rollstream.run.config.config import (
    accept_change,
    fingerprint,
    store_configuration,
    truncates_log,
)
from rollstream.run.config.recorded_configuration import accepted_changes, record_configuration
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.run_model import (
    adapter_folder,
    local_model_folder,
    model_folder,
    run_model,
    task_settings,
)
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import RoleContext, run_rule, set_torch_threads
from rollstream.run.roles.roles import hold_role_lease, with_publish_hook
from rollstream.run.supervisor.train_group import threads_per_rank
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.metrics_file import MetricsFile, read_metrics
from rollstream.storage.model_folder.hf_folder import read_small_file, small_files
from rollstream.storage.model_folder.hf_tokenizer import is_tokenizer_file, tokenizer_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollstream.consumers.trainer.sharded.ranks import Ranks
    from rollstream.consumers.trainer.sharded.starting_model import StartingModel


log = logging.getLogger(__name__)


def run_train(context: RoleContext) -> bool:
    """Runs as the only process of the trainer, as rank 0, or as a follower, until the last step
    (True) or until the role is stopped (False).
    """
    if context.configuration.has_model:
        # Seconds of imports, before a successor waits for the lease: then it trains at once.
        import_module("rollstream.consumers.trainer.learn.learner")
    with join_rank_group(context) as ranks:
        if ranks is not None and ranks.rank:
            return follow_rank_0(context, ranks)
        with hold_role_lease(context, "trainer", context.configuration.trainer.lease_s) as lease:
            return train(with_publish_hook(context), lease.term, ranks)


def starting_model(configuration: Configuration, folder: Path) -> "PreTrainedModel | PacedModel":
    """Returns the starting model of version 0, with adapters if the run trains some; without a
    model, random weights, which each step changes a little.
    """
    c = configuration
    if c.has_model:
        return _with_adapters(load_starting_model(c, folder), c, folder)
    return PacedModel(
        seed=c.seed,
        weights_bytes=c.paced.weights_bytes,
        changed_share=c.paced.changed_share,
        step_s=c.paced.train_step_s / c.paced.time_scale,
        token_s=c.paced.train_token_s / c.paced.time_scale,
    )


def load_starting_model(c: Configuration, folder: Path) -> "PreTrainedModel":
    """Loads the starting model of version 0 without adapters: from a folder on this host if one has
    the whole model, else from the run's store.
    """
    # Imported here and below: a paced run needs no code of models, which takes seconds.
    from rollstream.storage.starting_model.models import load_model, load_stored_model
    from rollstream.storage.starting_model.rows import ModelRows

    stored_model = run_model(c, folder)
    if stored_model is None:
        return load_model(str(local_model_folder(c, folder)))
    local_folder = stored_model.whole_folder()
    if local_folder is not None:
        return load_model(str(local_folder))
    return load_stored_model(str(model_folder(c, folder)), ModelRows(stored_model))


def _with_adapters(model: "PreTrainedModel", c: Configuration, folder: Path) -> "PreTrainedModel":
    if c.model.lora.rank:
        from rollstream.storage.model_folder.lora import attach_adapters

        dtype: torch.dtype = getattr(torch, c.weights.dtype)
        base, start = c.model.path or f"{c.run}/model", adapter_folder(c, folder)
        attach_adapters(model, c.model.lora, c.seed, dtype, base, start)
    return model


def make_paced_folder(task: Task, folder: Path) -> None:
    """A `config.json` with the size of the vocabulary, and the task's tokenizer; complete or not at
    all. An existing folder is kept.
    """
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = task.tokenizer()
    tokenizer.save(partial)
    fields = {"model_type": "paced", "vocab_size": tokenizer.size}
    (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.rename(partial, folder)


def shared_starting_model(configuration: Configuration, folder: Path) -> "StartingModel":
    """Returns the model for several ranks, each of which reads only the rows that it will hold."""
    from rollstream.consumers.trainer.sharded.starting_model import StartingModel
    from rollstream.storage.starting_model.models import load_empty_model
    from rollstream.storage.starting_model.rows import ModelRows

    path, stored_model = str(model_folder(configuration, folder)), run_model(configuration, folder)
    empty = load_empty_model(path, None if stored_model is None else ModelRows(stored_model))
    if empty is not None:
        return StartingModel(_with_adapters(empty[0], configuration, folder), empty[1])
    # Its files have other names or shapes of tensors than the model: transformers converts them
    # while it loads.
    log.warning("the model in %s is loaded whole by every rank: its names are converted", path)
    model = load_starting_model(configuration, folder)
    return StartingModel(_with_adapters(model, configuration, folder))


@contextmanager
def join_rank_group(context: RoleContext) -> Generator["Ranks | None"]:
    """Connects the ranks while the block runs, at whose end all end together. Yields None if this
    is the only process.
    """
    if not is_launched():
        yield None
        return
    from rollstream.consumers.trainer.learn.forward import device_of
    from rollstream.consumers.trainer.sharded.ranks import join_ranks

    settings = context.configuration.trainer
    if not context.configuration.has_model:
        raise ConfigurationError(
            f"trainer.learner = {settings.learner!r} must run as one process: it has no model to "
            "share; start it without torchrun"
        )
    with join_ranks(device_of(settings.device).type, settings.ranks_timeout_s) as ranks:
        yield ranks


def follow_rank_0(context: RoleContext, ranks: "Ranks") -> bool:
    """Returns True when the run is complete, False if rank 0 ended before."""
    from rollstream.consumers.trainer.sharded.follower import build_follower

    c = context.configuration
    set_torch_threads(threads_per_rank(c.trainer))
    plan, initial = trainer_plan(context), initial_model(context, ranks)
    store = with_publish_hook(context).store
    loop = build_follower(context.bus, store, plan, initial, c.run, context.stop.is_set)
    _log_model_read(context, ranks)
    if loop is None:
        return False
    context.watch.offer(loop.metric_values, lambda: [loop.take_feeder.ledger.reader])
    return loop.run(context.watch.turn_by(loop.take_feeder.ledger.ended))


def trainer_plan(context: RoleContext) -> TrainerPlan:
    """Returns a plan that is equal on every rank."""
    c = context.configuration
    archived = c.archive.topics if c.archive.enabled else ()
    rule = run_rule(c, context.folder)
    return TrainerPlan(c.trainer, rule, c.weights, c.checkpoints, truncates_log(c), archived)


def initial_model(context: RoleContext, ranks: "Ranks | None" = None) -> InitialModel:
    """Returns the model with the files of every version; with `ranks` one that these train
    together, with a hash by which they check that all start from the same.
    """
    c, folder = context.configuration, context.folder
    files = version_files(c, folder)
    if ranks is None:
        return InitialModel(starting_model(c, folder), files)
    from rollstream.consumers.trainer.sharded.learner import ShardedModel
    from rollstream.consumers.trainer.sharded.starting_model import model_hash

    start = shared_starting_model(c, folder)
    return InitialModel(ShardedModel(start, ranks), files, ranks, model_hash(start))


def _log_model_read(context: RoleContext, ranks: "Ranks | None") -> None:
    stored_model = run_model(context.configuration, context.folder)
    if stored_model is not None:
        log.info(
            "rank %d read %.1f MB of the starting model's %.1f MB from the store",
            0 if ranks is None else ranks.rank,
            stored_model.store_bytes / 1e6,
            stored_model.manifest.bytes / 1e6,
        )


def train(context: RoleContext, term: int, ranks: "Ranks | None" = None) -> bool:
    """Trains as the holder of the trainer's lease with this `term`. Returns True when the run is
    complete, False if the role was stopped. Raises `ConfigurationError` if the run was trained
    under another configuration that is not accepted.
    """
    c = context.configuration
    store_configuration(context.store, c)
    accept = partial(_accept, context)
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
        _log_model_read(context, ranks)
        # A crash may have left out the line of a recorded step.
        for line in missing_lines(trainer.recorded.done, read_metrics(lines)):
            metrics.append(line)
        context.watch.offer(trainer.metric_values, trainer.take_feeder.intake.readers)
        append = trainer.take_feeder.append_failures
        with nullcontext() if ranks is None else ranks.recording(append):
            return trainer.run(context.stop)


def _accept(context: RoleContext, before: str) -> bool:
    c, store = context.configuration, context.store
    is_accepted = accept_change(store, c, context.accept_config, before)
    for change in accepted_changes(context.bus, store, c) if is_accepted else ():
        log.warning("%s", change)
    return is_accepted


def version_files(c: Configuration, folder: Path) -> dict[str, bytes]:
    """Returns the version files of every version beside its weights: the starting model's
    configuration, and the tokenizer and chat template that are trained (of `task.tokenizer`, or the
    model's).
    """
    model = model_folder(c, folder)
    files = small_files(model)
    tokenizer = Path(task_settings(c, folder).tokenizer or model).expanduser()
    if c.task.tokenizer is not None and tokenizer.is_dir():
        files = {name: path for name, path in files.items() if not is_tokenizer_file(name)}
        tokenizer_files = small_files(tokenizer).items()
        files |= {name: path for name, path in tokenizer_files if is_tokenizer_file(name)}
        trained, loaded = tokenizer_class(tokenizer), tokenizer_class(tokenizer, model)
        if trained != loaded:
            log.warning(
                "task.tokenizer: transformers reads the tokenizer in %s by %s, and beside the "
                "config.json of %s, as in exports, by %s: their tokens may differ from those that "
                "are trained",
                *(tokenizer, trained or "a class", model, loaded or "another class"),
            )
    return {name: read_small_file(path) for name, path in sorted(files.items())}
