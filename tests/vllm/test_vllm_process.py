"""vLLM's core in a process of its own: the same contract, weights by shared memory, and its end."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.engines.vllm.local import weights
from rollstream.streams.values import Sampling
from testbed.repository import ROOT
from testbed.update_reference import over_old_cache
from testbed.waiting import WAIT_S
from tests.support.engine_samples import (
    V1,
    V2,
    Gained,
    ask,
    chosen_logprobs,
    gather,
    half_way,
    prompt,
    resumed,
    run_all,
    to_the_end,
)
from tests.vllm.vllm_samples import check_two_hundred_updates, held_in_file, vllm_model

pytestmark = pytest.mark.slow
GREEDY = Sampling(temperature=0, tokens_max=70)


def open_process(emit_every: int = 5) -> VllmEngine:
    """Always of one shape, so that the tests of this module share one process."""
    model = vllm_model("qwen3")
    return VllmEngine(model.config, model.state_dict(), V1, EngineOptions(4, 96, emit_every))


def test_in_flight_keeps_the_cache_and_stamps_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 3; a chunk for each tensor, of which two are staged beside decoding."""
    monkeypatch.setattr(weights.whole_chunks, "__defaults__", (1,))
    old, new = vllm_model("qwen3", 0), vllm_model("qwen3", 1)
    engine = open_process()
    gained = half_way(engine)
    staged = staged_files()
    update = engine.prepare(WeightUpdate(V2, new.state_dict()))
    assert staged_files() - staged == 2
    engine.update(update, "in_flight")
    assert staged_files() == staged
    mine = to_the_end(engine, gained)
    (_, before), (_, after) = mine.spans
    assert (mine.spans[0][0], mine.spans[1][0], before + after) == (V1, V2, 40)
    greedy, logprobs = over_old_cache(old, new, prompt(6), mine.tokens, before)
    assert mine.tokens == greedy
    torch.testing.assert_close(torch.tensor(mine.logprobs), logprobs, atol=1e-4, rtol=0)


def test_recomputing_equals_a_full_prefill_and_what_is_served_is_read_back() -> None:
    new = vllm_model("qwen3", 1)
    engine, tensors = open_process(), dict(new.state_dict())
    gained = half_way(engine)
    engine.update(WeightUpdate(V2, tensors), "in_flight_recompute")
    mine = to_the_end(engine, gained)
    before = mine.spans[0][1]
    wanted = chosen_logprobs(new, prompt(6), mine.tokens)[before:]
    torch.testing.assert_close(torch.tensor(mine.logprobs[before:]), wanted, atol=1e-4, rtol=0)
    assert engine.read_back(tensors, tensors).differing == ()
    old = vllm_model("qwen3").state_dict()
    assert "model.layers.0.mlp.up_proj.weight" in engine.read_back(old, old).differing


def test_tensors_in_a_file_are_mapped_by_the_worker_and_never_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded from the file, several chunks, and compared with it; tied names are one tensor."""
    monkeypatch.setattr(weights.whole_chunks, "__defaults__", (1,))
    new = vllm_model("qwen3", 1)
    engine, tensors = open_process(), held_in_file(new.state_dict())
    gained, staged = half_way(engine), staged_files()
    update = engine.prepare(WeightUpdate(V2, tensors))
    assert staged_files() == staged
    engine.update(update, "in_flight_recompute")
    mine = to_the_end(engine, gained)
    before = mine.spans[0][1]
    wanted = chosen_logprobs(new, prompt(6), mine.tokens)[before:]
    torch.testing.assert_close(torch.tensor(mine.logprobs[before:]), wanted, atol=1e-4, rtol=0)
    names = {name for name, _ in new.named_parameters()}
    assert engine.read_back(tensors, tensors) == WeightComparison(len(names), ())
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        tensors[name].view(torch.int32).view(-1)[-1] ^= 1
        assert engine.read_back([name], tensors).differing == (name,)
    assert staged_files() == staged


def test_moved_in_the_middle_greedy_tokens_stay_the_same() -> None:
    request = ask("mine", prompt(6), GREEDY)
    engine = open_process()
    whole = run_all(engine, [request])["mine"]
    part = {"mine": Gained()}
    for each in [ask("other", prompt(9), GREEDY), request]:
        engine.submit(each)
    while len(part["mine"].tokens) < 30:
        gather(part, engine.poll(0.1))
    rest = engine.abort("mine")
    gather(part, [rest] if rest else [])
    moved = run_all(engine, [resumed(request, part["mine"])])["mine"]
    assert part["mine"].tokens + moved.tokens == whole.tokens


def test_two_hundred_updates_under_load_lose_and_repeat_nothing() -> None:
    check_two_hundred_updates(open_process(emit_every=16), 0.02)


def test_a_failed_update_serves_nothing_until_one_succeeds() -> None:
    engine, new = open_process(), dict(vllm_model("qwen3", 1).state_dict())
    gained = half_way(engine)
    update = engine.prepare(WeightUpdate(V2, new))
    update.prepared.chunks.first[0].file.close()  # pyright: ignore[reportAttributeAccessIssue]  # its memory went
    with pytest.raises(EngineRefused, match="v00000002"):
        engine.update(update, "in_flight")
    assert (engine.poll(0.1), engine.version) == ([], V1)
    engine.update(WeightUpdate(V2, new), "in_flight")
    assert engine.read_back(new, new).differing == ()
    mine = to_the_end(engine, gained)
    assert (len(mine.tokens), [version for version, _ in mine.spans]) == (40, [V1, V2])


def test_its_process_ends_with_a_killed_rollout() -> None:
    line = [sys.executable, "-m", "tests.vllm.opens"]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rollout:
        assert rollout.stdout is not None
        assert rollout.stdout.readline() == "open\n"
        children = psutil.Process(rollout.pid).children(recursive=True)
        assert children
        os.kill(rollout.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []


def test_a_killed_core_is_an_error_of_the_rollout() -> None:
    """The engine of this module has ended by then."""
    engine = open_process()
    engine.submit(ask("t", prompt(6), GREEDY))
    for core in cores():
        core.kill()
    with pytest.raises(EngineRefused, match="ended"):
        poll_to_the_end(engine)


def test_a_core_that_is_killed_during_a_call_is_an_error_too() -> None:
    """vLLM itself would wait forever."""
    engine = open_process()
    update = engine.prepare(WeightUpdate(V2, vllm_model("qwen3", 1).state_dict()))
    for core in cores():
        core.suspend()  # it will not answer
    with ThreadPoolExecutor(1) as threads:
        updated = threads.submit(engine.update, update, "in_flight")
        wait([updated], timeout=2.0)
        assert not updated.done()
        for core in cores():
            core.kill()
        with pytest.raises(EngineRefused, match="ended"):
            updated.result(WAIT_S)


def staged_files() -> int:
    """Files in shared memory that this process has open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found += "rollstream-weights" in str(each.readlink())
    return found


def cores() -> list[psutil.Process]:
    """vLLM's living processes of this process."""
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    lines = {child: " ".join(child.cmdline()) for child in alive}
    return [c for c, line in lines.items() if "EngineCore" in line or "spawn_main" in line]


def poll_to_the_end(engine: VllmEngine) -> None:
    end = time.monotonic() + 60
    while engine.running() and time.monotonic() < end:
        engine.poll(1.0)
