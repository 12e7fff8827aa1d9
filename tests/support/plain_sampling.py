"""Generates a run's trajectories again by plain sampling: an engine without drafts, with the
versions in the run's own store. Under `keep_version` they depend on nothing else (invariants 4 and
10).

A difference must be one of rounding (docs/explanation/drafts.md): the uniform of that position is
within 1e-5 of the boundary between both tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import store_url
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import GENERATED, Prompt, Trajectory
from rollstream.streams.values import Tokens, Version
from testbed.run_process import read
from testbed.versions import model_from_version

SLOTS = 8
ROUNDING = 1e-5


def differing(folder: Path, records: Iterable[Trajectory]) -> list[str]:
    """The tokens that plain sampling does not give, by name and position; [] where it gives all."""
    configuration = load(folder / "config.json")
    store = open_store(store_url(configuration, folder))
    prompts = {prompt.group: prompt for prompt in read(folder, "prompts", Prompt)}
    return [
        what
        for version, some in groupby(sorted(records, key=version_of), key=version_of)
        for what in _differing(
            store, version, list(some), prompts, configuration.rollouts.context_max
        )
    ]


def version_of(record: Trajectory) -> Version:
    """Of all its tokens: it has one span."""
    (span,) = record.spans
    return span.version


def _differing(
    store: ObjectStore,
    version: Version,
    records: Sequence[Trajectory],
    prompts: dict[int, Prompt],
    context_max: int,
) -> Iterator[str]:
    model = model_from_version(store, version).eval()
    engine = TorchEngine(
        model.config, model.state_dict(), version, EngineOptions(SLOTS, context_max)
    )
    requests = {one.trajectory: request_of(one, prompts[one.group]) for one in records}
    for request in requests.values():
        engine.submit(request)
    plain: dict[str, list[Tokens]] = {name: [] for name in requests}
    while engine.running():
        for emission in engine.poll(60.0):
            plain[emission.trajectory].append(emission.tokens)
    for record in records:
        name = record.trajectory
        mine = record.tokens[record.sources == GENERATED].tolist()
        what = _difference(model, requests[name], np.concatenate(plain[name]).tolist(), mine)
        if what:
            yield f"{name} under {version}: {what}"


def request_of(record: Trajectory, prompt: Prompt) -> GenerationRequest:
    """The request to its first rollout."""
    sources = np.zeros(len(prompt.tokens), np.uint8)
    nothing = np.zeros(0, np.float32)
    return GenerationRequest(
        record.trajectory, record.group, prompt.tokens, sources, prompt.sampling, prompt.seed,
        nothing,
    )  # fmt: skip


def _difference(
    model: torch.nn.Module, request: GenerationRequest, plain: list[int], mine: list[int]
) -> str:
    """The position where they differ, unless rounding explains it; empty for equal tokens."""
    if plain == mine:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(plain, mine, strict=False)) if a != b), None)
    if at is None:
        return f"{len(mine)} tokens and not {len(plain)}"
    known = [*request.tokens.tolist(), *plain[:at]]
    with torch.inference_mode():
        logits = model(torch.tensor([known])).logits[0, -1] / request.sampling.temperature
    edges = logits.double().softmax(-1).cumsum(-1)
    key = np.array([trajectory_key(request.seed, request.trajectory)], np.uint64)
    drawn = uniforms(key, np.array([len(known)]))[0]
    low, high = sorted((plain[at], mine[at]))
    if high == low + 1 and abs(float(edges[low]) - drawn) < ROUNDING:
        return ""
    return f"token {at} of {len(mine)} is {mine[at]} and not {plain[at]}"
