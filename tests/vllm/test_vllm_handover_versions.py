"""Under which versions handed-over KV was computed, and where that may be used: what each update
mode promises holds for a moved trajectory too (invariants 3 and 4).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_samples import V1, V2, Gained, ask, chosen_logprobs, gather, prompt, resumed, run_all
from handover_samples import (
    BLOCK,
    counted,
    end,
    files,
    gain,
    joined,
    leave,
    model,
    opened,
    uninterrupted,
)
from transformers import DynamicCache

from producers.engines.base import Request, Update, UpdateMode
from producers.engines.vllm_engine import VllmEngine
from producers.engines.vllm_engine.handover.file import read_front
from streams.records import Sampling

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def at_version_2(folder: Path, mode: UpdateMode) -> VllmEngine:
    engine = joined(opened(), folder, mode)
    engine.update(Update(V2, model(1).state_dict()), mode)
    return engine


def over_blocks(moved: Request, old_tokens: int, chosen: list[int]) -> torch.Tensor:
    """Log-probabilities of what came after the move, by transformers: the first tokens' KV of the
    old weights, all else of the new.
    """
    kv, tokens = DynamicCache(), [*moved.tokens.tolist(), *chosen]
    with torch.inference_mode():
        if old_tokens:
            model()(torch.tensor([tokens[:old_tokens]]), past_key_values=kv, use_cache=True)
        logits = model(1)(torch.tensor([tokens[old_tokens:]]), past_key_values=kv).logits[0]
    before = len(moved.tokens) - old_tokens - 1
    rows = logits[before : before + len(chosen)].log_softmax(-1)
    return rows[torch.arange(len(chosen)), torch.tensor(chosen)]


def test_in_flight_goes_on_over_older_kv_which_nobody_else_sees(folder: Path) -> None:
    """As it would have had, had it stayed where V2 came in flight; and invariant 3."""
    source, target = joined(opened(), folder), at_version_2(folder, "in_flight")
    moved, before = leave(source), counted(target)
    rest = run_all(target, [moved])["mine"]
    assert (gain(target, before)["tokens_in"], rest.spans[0][0]) == (3 * BLOCK, V2)
    wanted = over_blocks(moved, 3 * BLOCK, rest.tokens)
    torch.testing.assert_close(torch.tensor(rest.logprobs), wanted, atol=1e-4, rtol=0)
    sibling = run_all(target, [ask("u", prompt(70), Sampling(tokens_max=20))])["u"]
    wanted = chosen_logprobs(model(1), prompt(70), sibling.tokens)
    torch.testing.assert_close(torch.tensor(sibling.logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["keep_version", "in_flight_recompute"])
def test_other_modes_use_kv_of_their_own_version_only(folder: Path, mode: UpdateMode) -> None:
    source, same = joined(opened(), folder, mode), joined(opened(), folder, mode)
    before = counted(same)
    assert end(same, leave(source)) == uninterrupted()
    assert gain(same, before)["taken_in"] == 1
    newer = at_version_2(folder, mode)
    moved, before = leave(source), counted(newer)
    rest = run_all(newer, [moved])["mine"]
    assert gain(newer, before)["taken_in"] == len(files(folder)) == 0
    wanted = over_blocks(moved, 0, rest.tokens)
    torch.testing.assert_close(torch.tensor(rest.logprobs), wanted, atol=1e-4, rtol=0)


def test_kv_of_a_later_version_is_not_used_by_an_earlier_one(folder: Path) -> None:
    source, target = at_version_2(folder, "in_flight"), joined(opened(), folder)
    moved = leave(source)
    alone, before = end(opened(), moved), counted(target)
    assert end(target, moved) == alone
    assert gain(target, before)["taken_in"] == len(files(folder)) == 0


def test_after_recomputing_it_is_of_the_new_version_alone(folder: Path) -> None:
    """Handed V1's, it recomputes under V2, takes nothing in again, and hands that on."""
    mode: UpdateMode = "in_flight_recompute"
    source, between, last = (joined(opened(), folder, mode) for _ in range(3))
    for engine in (between, last):
        engine.poll(0.0)
    moved, before = leave(source, count=30), counted(between)
    between.submit(moved)
    part = {"mine": Gained()}
    gather(part, between.poll(0.0))
    between.update(Update(V2, model(1).state_dict()), mode)
    while len(part["mine"].tokens) < 14:
        gather(part, between.poll(0.1))
    rest = between.abort("mine")
    gather(part, [rest] if rest else [])
    assert gain(between, before)["taken_in"] == 1
    (lies,) = files(folder)
    front = read_front(lies)
    assert front is not None
    assert front.versions == {V2}
    last.update(Update(V2, model(1).state_dict()), mode)
    onward, before = resumed(moved, part["mine"]), counted(last)
    onward = replace(onward, logprobs=np.concatenate((moved.logprobs, onward.logprobs)))
    ended = run_all(last, [onward])["mine"]
    assert gain(last, before)["taken_in"] == 1
    wanted = over_blocks(onward, 0, ended.tokens)
    torch.testing.assert_close(torch.tensor(ended.logprobs), wanted, atol=1e-4, rtol=0)


def test_weights_in_doubt_hand_nothing_over(folder: Path) -> None:
    source, wrong = joined(opened(), folder), model(1).state_dict()
    assert source.read_back(wrong, wrong).differing
    leave(source)
    assert files(folder) == []
    source.update(Update(V1, model().state_dict()), "in_flight_recompute")
    leave(source)
    assert len(files(folder)) == 1
