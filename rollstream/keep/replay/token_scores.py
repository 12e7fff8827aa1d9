"""`rollstream replay RUN --token-scores`: the trainer's log-probability and entropy of each
generated token under the version that sampled it, for the explorer. A difference from the recorded
log-probability is the mismatch of engine and trainer (docs/explanation/learning.md), with rounding
of the published weights and, in later spans (`in_flight`), a KV cache of older weights.

Writes RUN/token-scores.parquet and nothing else, so the run may be living; present scores are kept,
so the same command resumes. Exit code 1: no token could be scored, because the store keeps none of
the versions.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample, admitted_sample
from rollstream.consumers.trainer.data.selection import pack_micro_batches
from rollstream.consumers.trainer.learn.forward import device_of, policy_scorer
from rollstream.consumers.trainer.learn.masters import Masters
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.learn.row_layout import to_device, token_rows
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.keep.replay.conditions import meets_conditions, needs_steps, parse_conditions
from rollstream.keep.replay.recorded_steps import steps_of_run
from rollstream.keep.source import RunSource, open_run_source
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
from rollstream.run.signals import progress_bar, warn
from rollstream.storage.model_folder.hf_folder import hf_vocabulary_size
from rollstream.storage.model_folder.lora import PREFIX
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Floats, Version

CHUNK_TOKENS = 4 << 20
"""Tokens in memory at once, about 40 MB. A version is loaded once for all of them."""


class VersionScorer:
    """Scores trajectories under the versions in `store`. It owns `model`, the run's starting model
    (float32, with its adapters), and computes in the type and on the device of the trainer's
    `settings`.
    """

    def __init__(
        self, store: ObjectStore, model: PreTrainedModel, settings: TrainerSettings
    ) -> None:
        self._store, self._settings = store, settings
        self._device = device_of(settings.device)
        compute: torch.dtype = getattr(torch, settings.compute)
        is_general = compute != torch.float32 or settings.compile
        self._model = model.eval()
        self._policy = policy_scorer(model, is_general, joins=settings.varlen_attention)
        self._masters = Masters(model, compute, self._device, settings.cpu_offload)
        self._held = ResidentWeights()
        self.missing: set[Version] = set()
        """Needed versions that are no longer in the store."""

    def score(self, records: Sequence[Trajectory]) -> list[tuple[Floats, Floats]]:
        """Returns log-probabilities [G] and entropies [G] of the generated tokens of each record,
        which `refusal` has accepted; NaN for tokens of a version that is not stored.
        """
        scores = [(_unknown(record), _unknown(record)) for record in records]
        for version in sorted({span.version for record in records for span in record.spans}):
            if not self._load(version):
                continue
            masks = [_tokens_of(record, version) for record in records]
            scored = self._scored(
                replace(admitted_sample(record, 0.0), mask=mask)
                for record, mask in zip(records, masks, strict=True)
                if mask.any()
            )
            for record, mask, values in zip(records, masks, scores, strict=True):
                if mask.any():
                    values[0][mask], values[1][mask] = scored[record.trajectory]
        return scores

    def _load(self, version: Version) -> bool:
        if version in self.missing:
            return False
        try:
            self._held.update(self._store, version)
        except ObjectMissing:
            self.missing.add(version)
            return False
        masters = self._masters.named(self._masters.flat)
        others: dict[str, torch.Tensor] = self._model.state_dict()
        with torch.no_grad():
            for stored, tensor in self._held.tensors.items():
                name = stored.removeprefix(PREFIX)
                (masters[name] if name in masters else others[name]).copy_(tensor)
            self._masters.round()
        return True

    def _scored(self, samples: Iterable[Sample]) -> dict[str, tuple[Floats, Floats]]:
        by_trajectory: dict[str, tuple[Floats, Floats]] = {}
        for batch in pack_micro_batches([*samples], self._settings.micro_batch_tokens):
            with torch.no_grad():
                scores = self._policy(to_device(token_rows(batch), self._device))
            logprobs, entropy = (
                values.float().cpu().numpy() for values in (scores.logprobs, scores.entropy)
            )
            start = 0
            for sample in batch:
                end = start + int(np.count_nonzero(sample.mask))
                by_trajectory[sample.trajectory] = (logprobs[start:end], entropy[start:end])
                start = end
        return by_trajectory


def _unknown(record: Trajectory) -> Floats:
    return np.full(len(record.logprobs), np.nan, np.float32)


def _tokens_of(record: Trajectory, version: Version) -> NDArray[np.bool_]:
    mask = np.zeros(len(record.logprobs), np.bool_)
    for span in record.spans:
        if span.version == version:
            mask[span.start : span.end] = True
    return mask


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


def main(arguments: argparse.Namespace) -> int:
    """Score the tokens; prints their number and their difference from the rollouts' own."""
    run = arguments.runs[0]
    with open_run_source(run, arguments.name) as source:
        total = sum(source.log.end("trajectories").values())
        with progress_bar("trajectories", total) as advance:
            scoring = score_run_tokens(source, arguments.where, advance)
    if scoring.trajectories and not scoring.tokens:
        raise ObjectMissing(
            f"none of {scoring.trajectories} trajectories could be scored: the store keeps none of "
            f"the versions that sampled them ({_versions(scoring)})"
        )
    if arguments.json:
        print(json.dumps(_line(scoring)))
    else:
        _print(scoring)
    return 0


def _line(scoring: TokenScoring) -> dict[str, object]:
    return {
        "file": str(scoring.path),
        "trajectories": scoring.trajectories,
        "before": scoring.before,
        "refused": scoring.refused,
        "tokens": scoring.tokens,
        "missing_versions": dict(scoring.missing),
        "mismatch_tokens": scoring.compared,
        "mismatch_mean": scoring.difference_mean,
        "mismatch_max": scoring.difference_max,
    }


def _print(scoring: TokenScoring) -> None:
    if scoring.refused:
        warn(f"{scoring.refused} trajectories have nothing to score: they failed")
    if scoring.missing:
        lost = sum(scoring.missing.values())
        warn(
            f"{lost:,} tokens have no scores: the store does not keep {_versions(scoring)} any more"
        )
    if scoring.before:
        print(f"{scoring.before:,} trajectories had scores before")
    if scoring.compared:
        print(
            f"{scoring.trajectories:,} trajectories, {scoring.tokens:,} tokens scored; in first "
            f"spans trainer and rollout differ by {scoring.difference_mean:.2g} in the mean and "
            f"{scoring.difference_max:.2g} at most"
        )
    print(f"{scoring.path}; `rollstream explore` shows them by token")


def _versions(scoring: TokenScoring) -> str:
    names = sorted(scoring.missing)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def score_run_tokens(
    source: RunSource, where: Sequence[str], advance: Callable[[int], None]
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


def _folder_and_settings(source: RunSource) -> tuple[Path, Configuration]:
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
    source: RunSource,
    where: Sequence[str],
    scoring: TokenScoring,
    advance: Callable[[int], None],
) -> Iterator[Trajectory]:
    conditions = parse_conditions(where)
    steps = steps_of_run(source).step_of() if needs_steps(conditions) else {}
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
        if not meets_conditions(conditions, record, log_record.timestamp_ms, step):
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
