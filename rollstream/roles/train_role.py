"""The trainer as a role: its starting model, its settings and its place in one `Trainer`."""

from functools import partial
from pathlib import Path

from rollstream.consumers.trainer.build import InitialModel, TrainerPlan, Provenance, build_trainer
from rollstream.consumers.trainer.step_lines import missing_lines
from rollstream.config.change import accept_change, store_configuration
from rollstream.roles.bounds import run_rule
from rollstream.config.config import fingerprint, truncates_log
from rollstream.config.run_folder import RunFolder, model_folder
from rollstream.config.identity import read_or_create_identity, record_configuration
from rollstream.revision import code_revision
from rollstream.roles.context import RoleContext, set_torch_threads
from rollstream.roles.initial_model import starting_model
from rollstream.supervisor.train_group import threads_per_rank
from rollstream.roles.train import RankGroup
from rollstream.storage.metrics_file import MetricsFile, read_metrics

SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
SMALL_BYTES_MAX = 64 << 20  # the largest tokenizers have 35 MB


def train(place: RoleContext, term: int, party: RankGroup | None = None) -> bool:
    """Train to the run's last step, with the other ranks of the `party` where there is one; True
    when it is complete. Another configuration than the run had is refused, unless
    `place.accept_config`.
    """
    c = place.configuration
    store_configuration(place.store, c)
    accept = partial(accept_change, place.store, c, place.accept_config)
    set_torch_threads(threads_per_rank(c.trainer))
    start, model = model_folder(c, place.folder), starting_model(c, place.folder)
    archived = c.archive.topics if c.archive.enabled else ()
    rule = run_rule(c, place.folder)
    lines = RunFolder(place.folder).metrics / "trainer.jsonl"
    with MetricsFile(lines) as metrics:
        trainer = build_trainer(
            place.bus,
            place.store,
            TrainerPlan(c.trainer, rule, c.weights, c.checkpoints, truncates_log(c), archived),
            InitialModel(party.share(model) if party else model, config_and_tokenizer_files(start)),
            Provenance(
                c.run,
                term,
                fingerprint(c),
                code_revision(),
                accept,
                read_or_create_identity(place.store, c.run).id,
            ),
            metrics,
        )
        record_configuration(place.store, c)
        for line in missing_lines(trainer.recorded.done, read_metrics(lines)):
            metrics.append(line)
        place.watch.offer(trainer.figures, trainer.readers)
        return trainer.run(place.stop)


def config_and_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Configuration and tokenizer of a checkpoint folder: what every version carries beside its
    weights. Folders from the Hub hold other things too (weights in other formats, pictures).
    """
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in SMALL_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= SMALL_BYTES_MAX
    }
