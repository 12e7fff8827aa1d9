"""Scores the recorded tokens of a run again, for the explorer. Nothing else of the run is written,
so it may be living.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.replay.token_scores import VersionScorer
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.errors import ConfigurationError
from rollstream.keep.replay import is_wanted_trajectory, needs_steps, parse_conditions
from rollstream.keep.replay_output import ReplaySource
from rollstream.look.query.looking import require_code
from rollstream.look.query.token_scores import (
    TOKEN_SCORES_FILE,
    TRAJECTORIES_MAX,
    ScoredTrajectory,
    stored_hashes,
    text_hash,
    write_token_scores,
)
from rollstream.run.config.config import load
from rollstream.run.config.run_model import model_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import set_torch_threads, training_bounds
from rollstream.run.roles.train import starting_model
from rollstream.storage.model_folder.hf_folder import hf_vocabulary_size
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Floats

CHUNK_TOKENS = 4 << 20
"""Tokens in memory at once, about 40 MB. A version is loaded once for all of them."""


@dataclass(slots=True)
class TokenScoring:
    """Counts the trajectories scored and written to `path`. `before` were in the file already,
    `refused` cannot be trained (dead ones too). `missing` counts the tokens of versions that the
    store lacks. The differences are the trainer's log-probabilities minus the recorded ones, of
    `compared` tokens.
    """

    path: Path
    trajectories: int = 0
    tokens: int = 0
    before: int = 0
    refused: int = 0
    missing: Counter[str] = field(default_factory=Counter[str])
    compared: int = 0
    difference_sum: float = 0.0
    difference_max: float = 0.0

    @property
    def difference_mean(self) -> float:
        return self.difference_sum / self.compared if self.compared else 0.0

    def add(self, record: Trajectory, logprobs: Floats) -> None:
        self.trajectories += 1
        is_scored = ~np.isnan(logprobs)
        self.tokens += int(np.count_nonzero(is_scored))
        for span in record.spans:
            lost = int(np.count_nonzero(~is_scored[span.start : span.end]))
            if lost:
                self.missing[str(span.version)] += lost
        # Later spans may be over a KV cache of older weights.
        first = slice(record.spans[0].start, record.spans[0].end)
        size = np.abs(logprobs[first].astype(np.float64) - record.logprobs[first])
        size = size[is_scored[first]]
        self.compared += len(size)
        self.difference_sum += float(size.sum())
        self.difference_max = max(self.difference_max, float(size.max(initial=0.0)))


def score_run_tokens(
    source: ReplaySource, where: Sequence[str], advance: Callable[[int], None]
) -> TokenScoring:
    """Score the trajectories that meet the conditions (`--where`), each token under the version
    that sampled it, and write `token-scores.parquet` in the run's folder. `advance` is called with
    numbers of read records. Scores in the file are not computed again, so an interrupted call is
    repeated at little cost.

    Raises `ConfigurationError` for a run without folder, settings, weights or model, for no
    trajectory, and for more than `TRAJECTORIES_MAX`.
    """
    folder, c = _folder_and_settings(source)
    assert source.store is not None
    scoring = TokenScoring(folder / TOKEN_SCORES_FILE)
    records = _wanted(source, where, scoring, advance)
    first = next(records, None)
    if first is None and not scoring.before:
        raise ConfigurationError(f"{source.location.name} has no such finished trajectory")
    if first is None:
        return scoring
    disable_progress_bar()  # of transformers: it would mix with the command's output
    set_torch_threads(c.trainer.threads * c.trainer.workers)
    model = starting_model(c, folder)
    assert not isinstance(model, PacedModel), "refused before"
    scorer = VersionScorer(source.store, model, c.trainer)
    bounds = training_bounds(c, hf_vocabulary_size(model_folder(c, folder)))
    write_token_scores(scoring.path, _rows(chain([first], records), scorer, bounds, scoring))
    return scoring


def _folder_and_settings(source: ReplaySource) -> tuple[Path, Configuration]:
    folder = source.location.folder
    if folder is None or not (folder / "config.json").is_file() or source.store is None:
        raise ConfigurationError(
            f"{source.location.name}: scores need the run's config.json and its weights, and are "
            "kept in the run's folder; give that folder"
        )
    require_code(source.location, "trainer")
    source.location.files.path(TOKEN_SCORES_FILE)  # a link that leaves the run is refused
    c = load(folder / "config.json")
    if not c.has_model:
        raise ConfigurationError(
            f"{source.location.name}: a paced trainer has no model, so no token has a score"
        )
    return folder, c


def _wanted(
    source: ReplaySource,
    where: Sequence[str],
    scoring: TokenScoring,
    advance: Callable[[int], None],
) -> Iterator[Trajectory]:
    conditions = parse_conditions(where)
    steps = source.recorded().step_of() if needs_steps(conditions) else {}
    stored = stored_hashes(scoring.path)
    seen: set[str] = set()
    selected = 0
    for log_record in source.log.topic("trajectories").records():
        advance(1)
        record = log_record.record
        if not isinstance(record, Trajectory) or record.trajectory in seen:
            continue
        # The first completion of a trajectory counts (invariant 2).
        seen.add(record.trajectory)
        step = steps.get(log_record.address)
        if not is_wanted_trajectory(conditions, record, log_record.timestamp_ms, step):
            continue
        if stored.get(record.trajectory) == text_hash(record):
            scoring.before += 1
            continue
        selected += 1
        if selected + len(stored) > TRAJECTORIES_MAX:
            raise ConfigurationError(
                f"{scoring.path} would hold more than {TRAJECTORIES_MAX:,} trajectories; select "
                "fewer with --where, or delete the file"
            )
        yield record


def _rows(
    records: Iterator[Trajectory],
    scorer: VersionScorer,
    bounds: TrainingBounds,
    scoring: TokenScoring,
) -> Iterator[ScoredTrajectory]:
    for chunk in _chunks(records):
        scorable = [record for record in chunk if refusal(record, bounds) is None]
        scoring.refused += len(chunk) - len(scorable)
        for record, (logprobs, entropy) in zip(scorable, scorer.score(scorable), strict=True):
            scoring.add(record, logprobs)
            yield ScoredTrajectory(
                record.trajectory, record.group, text_hash(record), logprobs, entropy
            )


def _chunks(records: Iterator[Trajectory]) -> Iterator[list[Trajectory]]:
    chunk: list[Trajectory] = []
    tokens = 0
    for record in records:
        chunk.append(record)
        tokens += len(record.tokens)
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk
