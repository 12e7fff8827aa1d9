"""KV that goes along when a trajectory moves between vLLM engines of a node: taken in where it is
exactly right (counted by vLLM's side, not timed), computed anew everywhere else, and the tokens are
the same either way (invariant 10; greedy, so a difference shows).

All engines within this process have the connector, as vLLM wants it.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_samples import ask, prompt, run_all
from handover_samples import (
    BLOCK,
    counted,
    end,
    files,
    gain,
    joined,
    leave,
    opened,
    uninterrupted,
)

from producers.engines.vllm_engine import VllmEngine
from producers.engines.vllm_engine.handover.file import encode_front, read_front
from producers.engines.vllm_engine.handover.part import Handover
from producers.settings import VllmSettings
from streams.errors import EngineRefused
from streams.records import Sampling

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def pair(folder: Path) -> tuple[VllmEngine, VllmEngine]:
    return joined(opened(), folder), joined(opened(), folder)


def test_a_moved_trajectory_takes_its_kv_along(
    pair: tuple[VllmEngine, VllmEngine], folder: Path
) -> None:
    source, target = pair
    at_source, at_target = counted(source), counted(target)
    moved = leave(source)
    assert gain(source, at_source)["handed_out"] == len(files(folder)) == 1
    assert end(target, moved) == uninterrupted()
    blocks = (len(moved.tokens) - 1) // BLOCK
    assert gain(target, at_target) == {
        "handed_out": 0,
        "taken_in": 1,
        "tokens_in": blocks * BLOCK,
        "refused": 0,
    }
    assert blocks == 3
    assert files(folder) == []  # it is of use once


def test_blocks_that_are_there_already_are_not_taken_in_again(
    pair: tuple[VllmEngine, VllmEngine],
) -> None:
    """Samples of a group share the prompt's blocks of the prefix cache."""
    source, target = pair
    run_all(target, [ask("sibling", prompt(70), Sampling(temperature=0, tokens_max=2))])
    before = counted(target)
    assert end(target, leave(source)) == uninterrupted()
    assert gain(target, before)["tokens_in"] == BLOCK


# ---- whatever is not exactly right -------------------------------------------------------------


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flipped(path: Path) -> None:
    """The last bit of the last block."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def forged(**changes: object) -> Callable[[Path], None]:
    """A well-formed file that says something else."""

    def forge(path: Path) -> None:
        front = read_front(path)
        assert front is not None
        body = path.read_bytes()[front.begin :]
        path.write_bytes(encode_front(replace(front, **changes)) + body)  # type: ignore[arg-type]

    return forge


BROKEN: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "torn": torn,
    "empty": lambda path: path.write_bytes(b"") and None,
    "flipped": flipped,
    "rubbish": lambda path: path.write_bytes(os.urandom(path.stat().st_size)) and None,
    "other run": forged(run="another"),
    "other trajectory": forged(trajectory="another"),
    "other layout": forged(layout="another"),
    "other tokens": forged(tokens=np.arange(96, dtype=np.uint32)),
    "other blocks": forged(block=16),
    "no version": forged(versions=frozenset()),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_exactly_right_is_computed_anew(
    pair: tuple[VllmEngine, VllmEngine], folder: Path, how: str
) -> None:
    source, target = pair
    moved, before = leave(source), counted(target)
    (lies,) = files(folder)
    BROKEN[how](lies)
    assert end(target, moved) == uninterrupted()
    assert (gain(target, before)["taken_in"], files(folder)) == (0, [])


def test_a_file_that_goes_after_it_was_looked_for_is_computed_anew(
    pair: tuple[VllmEngine, VllmEngine], folder: Path
) -> None:
    """Between our side's look and vLLM's."""
    source, target = pair
    moved, before = leave(source), counted(target)
    target.submit(moved)
    target._admit()
    files(folder)[0].unlink()
    rest = run_all(target)["mine"]
    assert [*moved.tokens[70:].tolist(), *rest.tokens] == uninterrupted()
    counts = gain(target, before)
    assert (counts["taken_in"], counts["refused"]) == (0, 1)


def test_where_there_is_no_room_nothing_is_handed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handover.__init__, "__defaults__", (1000,))
    source, target = joined(opened(), folder), joined(opened(), folder)
    moved, before = leave(source), counted(target)
    assert files(folder) == []
    assert end(target, moved) == uninterrupted()
    assert gain(target, before)["taken_in"] == 0


# ---- processes ---------------------------------------------------------------------------------


def test_a_core_of_its_own_takes_in_what_another_process_left(folder: Path) -> None:
    source = joined(opened(), folder)
    target = joined(opened(VllmSettings(kv_handover=True)), folder)
    before = counted(target)
    assert end(target, leave(source)) == uninterrupted()
    assert gain(target, before)["taken_in"] == 1


def test_a_core_of_its_own_hands_over_and_may_then_be_killed(folder: Path) -> None:
    """The core of the test before."""
    source = joined(opened(VllmSettings(kv_handover=True)), folder)
    target = joined(opened(), folder)
    moved, before = leave(source), counted(target)
    for _ in range(20):  # it decodes on meanwhile, and may have come to its end
        if not files(folder):
            moved = leave(source)
    for child in psutil.Process().children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()) or "spawn_main" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineRefused, match="ended"):
        run_all(source, [ask("t", prompt(6), Sampling(tokens_max=60))])
    assert end(target, moved) == uninterrupted()
    assert gain(target, before)["taken_in"] == 1


def test_off_is_the_default_and_writes_nothing(folder: Path) -> None:
    source = opened(VllmSettings())
    with pytest.raises(EngineRefused, match="kv_handover"):
        joined(source, folder)
    assert end(source, leave(source)) == uninterrupted()
    assert not folder.exists()


def test_engines_within_one_process_are_all_with_it_or_none() -> None:
    with pytest.raises(EngineRefused, match="kv_handover must be the same"):
        opened(VllmSettings(process=False))
    with pytest.raises(EngineRefused, match="tensor_parallel"):
        opened(VllmSettings(kv_handover=True, tensor_parallel=2))
