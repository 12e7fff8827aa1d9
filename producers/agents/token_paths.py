"""What an agent's episode does with its trajectory: continue one of its paths, or begin again."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.rollout.chain import extend_spans
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams import records
from rollstream.streams.branches import path_to
from rollstream.streams.values import Branch, Span, Tokens


def retried(running: RunningTrajectory, failure: str, now_s: float) -> RunningTrajectory:
    """Returns the trajectory of the next try: without tokens, and with a new chain of partials."""
    retry = RunningTrajectory.start(running.assignment, None, now_s, is_episode=True)
    retry.started_s, retry.failures = running.started_s, (*running.failures, failure)
    return retry


def extend_prompt(running: RunningTrajectory, tokens: Tokens, at: int) -> None:
    """Append a program's tokens behind the token at `at` (-1: as a path of their own). Behind any
    but the newest token a branch begins.
    """
    source = records.ENVIRONMENT if running.length else records.PROMPT
    if running.length and at != running.length - 1:
        running.branches.append(Branch(running.length, at))
    running.tokens.append(tokens)
    running.sources.append(np.full(len(tokens), source, np.uint8))
    running.length += len(tokens)


def path_request(running: RunningTrajectory, at: int, added: Tokens) -> GenerationRequest:
    """Returns the request to continue the path that ends at token index `at` (-1: begin one) with
    `added`, which the trajectory does not have yet.
    """
    assignment, (tokens, sources) = running.assignment, running.content()
    path = path_to(at, running.branches)
    number = np.cumsum(sources == records.GENERATED) - 1
    chosen = number[path[sources[path] == records.GENERATED]]
    source = records.ENVIRONMENT if len(path) else records.PROMPT
    return GenerationRequest(
        trajectory=assignment.trajectory,
        group=assignment.group,
        tokens=np.concatenate([tokens[path], added]),
        sources=np.concatenate([sources[path], np.full(len(added), source, np.uint8)]),
        sampling=assignment.sampling,
        seed=assignment.seed,
        logprobs=running.generated_logprobs()[chosen],
        spans=_spans_of(running.spans, chosen),
    )


def _spans_of(spans: Sequence[Span], chosen: NDArray[np.int64]) -> tuple[Span, ...]:
    chosen_spans: list[Span] = []
    begin = 0
    for span in spans:
        count = int(np.count_nonzero((chosen >= span.start) & (chosen < span.end)))
        # Spans count the chosen tokens alone.
        if count:
            extend_spans(chosen_spans, Span(begin, begin + count, span.version))
        begin += count
    return tuple(chosen_spans)
