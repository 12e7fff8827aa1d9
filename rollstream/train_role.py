"""The trainer as a role: its starting model, its settings and its place in one `Trainer`."""

from functools import partial
from pathlib import Path

from consumers.trainer.resume import Begin, Plan, Provenance, build_trainer
from consumers.trainer.step_lines import missing_lines
from rollstream.accepting import accept_change, keep_configuration
from rollstream.bounds import run_rule
from rollstream.config import fingerprint, truncates
from rollstream.folder import RunFolder, model_folder
from rollstream.identity import identify, record
from rollstream.revision import code_revision
from rollstream.role_place import Place, set_threads
from rollstream.starting import starting_model
from rollstream.train_group import threads_of_rank
from rollstream.train_ranks import Party
from storage.metrics import MetricsFile, read_metrics

SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
SMALL_BYTES_MAX = 64 << 20  # the largest tokenizers have 35 MB


def train(place: Place, term: int, party: Party | None = None) -> bool:
    """Train to the run's last step, with the other ranks of the `party` where there is one; True
    when it is complete. Another configuration than the run had is refused, unless
    `place.accept_config`.
    """
    c = place.configuration
    keep_configuration(place.store, c)
    accept = partial(accept_change, place.store, c, place.accept_config)
    set_threads(threads_of_rank(c.trainer))
    start, model = model_folder(c, place.folder), starting_model(c, place.folder)
    archived = c.archive.topics if c.archive.enabled else ()
    rule = run_rule(c, place.folder)
    lines = RunFolder(place.folder).metrics / "trainer.jsonl"
    with MetricsFile(lines) as metrics:
        trainer = build_trainer(
            place.bus,
            place.store,
            Plan(c.trainer, rule, c.weights, c.checkpoints, truncates(c), archived),
            Begin(party.share(model) if party else model, small_files(start)),
            Provenance(
                c.run,
                term,
                fingerprint(c),
                code_revision(),
                accept,
                identify(place.store, c.run).id,
            ),
            metrics,
        )
        record(place.store, c)
        for line in missing_lines(trainer.recorded.done, read_metrics(lines)):
            metrics.append(line)
        place.watch.offer(trainer.figures, trainer.readers)
        return trainer.run(place.stop)


def small_files(folder: Path) -> dict[str, bytes]:
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
