"""Extends vLLM's worker by methods that load weights, read them back, and turn drafts on.

vLLM imports this module in each of its workers (`worker_extension_cls`). The import registers the
transfer engine there, replaces a faulty function of the sampler (`patch_sampler`), and makes a
worker in another process end with the rollout that started it (`end_with_parent`).
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from rollstream.producers.drafts.gate import WINDOW_RULES, DraftGate
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.index import DraftSource
from rollstream.producers.drafts.node import CombinedSource, SharedHistory, running_tokens
from rollstream.producers.engines.vllm.parameter_map import (
    PartState,
    combined,
    served_factors,
    served_part,
)
from rollstream.producers.engines.vllm.proposer_speculation import DraftCounters
from rollstream.producers.engines.vllm.release import (
    HAS_TRITON,
    WeightTransferEngineFactory,
    rejection_sampler,
)
from rollstream.producers.engines.vllm.staging import NamedTensors, StagedTensor, staged_tensors
from rollstream.producers.engines.vllm.transfer import VersionTransfer, is_elsewhere, loaded_part
from rollstream.storage.lora import HIGH

NODE_TOKENS = 1 << 18  # tokens of a node's history, the default of rollouts.drafts_tokens


class DraftingWorker:
    """Adds to vLLM's worker the method that turns drafts on; it uses the worker's attributes."""

    model_runner: Any
    rank: int

    def draft_from(
        self, source: DraftSource | str | None, window: str, forced: bool | None, counters_path: str
    ) -> None:
        """Draft from this history, or from the one in this file; with None, stop drafting. With
        several workers vLLM uses the drafts of the first, so only that one writes counts. `window`
        names a rule in `WINDOW_RULES`, `forced` fixes the gate.
        """
        runner = self.model_runner
        if source is None:
            runner.drafter.draft_from(runner, None)
            return
        # On a CPU other processes lengthen wall-clock time, but not the time of this thread.
        clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
        if isinstance(source, str):
            most = running_tokens(runner.max_num_reqs, runner.max_model_len, NODE_TOKENS)
            source = CombinedSource(SharedHistory(source), AnswerHistory(most))
        gate = DraftGate(WINDOW_RULES[window], forced)
        if runner.device.type == "cpu":
            skip_empty_verification(runner)
        counters = DraftCounters(counters_path) if self.rank == 0 else None
        runner.drafter.draft_from(runner, (source, gate, clock, counters))


def skip_empty_verification(runner: Any) -> None:
    """Make later steps without drafts plain ones. A runner that can verify drafts runs verification
    in every step, also without drafts; for a small model, this rejection sampling of no drafts
    takes a tenth of a step or more. Idempotent.
    """
    if "_prepare_inputs" in vars(runner):
        return
    prepare = runner._prepare_inputs

    def prepared(scheduled: Any, *arguments: Any) -> Any:
        if scheduled.scheduled_spec_decode_tokens:
            return prepare(scheduled, *arguments)
        speculative, runner.speculative_config = runner.speculative_config, None
        try:
            return prepare(scheduled, *arguments)
        finally:
            runner.speculative_config = speculative

    runner._prepare_inputs = prepared


def patch_sampler() -> None:
    """Replace a faulty function of vLLM; does nothing if triton is installed.

    vLLM 0.32 without triton reads temperatures, top-k and top-p of drafted positions from memory
    that was never written (upstream issue 55005): its kernel for the CPU writes into a copy that is
    never read. The function that calls the kernel is replaced.
    """
    if not HAS_TRITON:
        rejection_sampler.expand_batch_to_tokens = expand_to_tokens


def expand_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Expand a value per request to one per drafted token; `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, replace_to, x)
    return values.repeat_interleave(counts, output_size=num_tokens)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5


def end_with_parent() -> None:
    """End this process when its parent ends, also after `kill -9`: otherwise a worker would keep
    computing and keep its memory. Does nothing if Python's multiprocessing did not start it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent.pid,), daemon=True).start()
    if os.getppid() != parent.pid:  # the parent died before the call above
        _end()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


end_with_parent()
patch_sampler()
if "rollstream" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("rollstream", VersionTransfer)


class WorkerExtension(DraftingWorker):
    """Adds methods to vLLM's worker that load and compare weights; they use its attributes."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def give_up_update(self) -> None:
        """End an update that failed between chunks, as vLLM's own methods do when a chunk fails."""
        self._weight_update_active = False
        self.weight_transfer_engine.give_up()

    def call_staged(
        self, method: str, arguments: tuple[Any, ...], path: str, entries: list[StagedTensor]
    ) -> Any:
        """Return the result of a method of this class whose last argument are a staged file's
        tensors.
        """
        return getattr(self, method)(*arguments, staged_tensors(path, entries))

    def compare_part(self, names: list[str], tensors: NamedTensors) -> PartState:
        """Compare the bits that this worker serves under all these names of one tensor with those
        that loading the whole tensor gives at its rank.
        """
        ((_, tensor),) = tensors
        model = self.model_runner.get_model()
        parts = [served_part(model, name) for name in names if not is_elsewhere(model, name)]
        if not parts:
            return "elsewhere"
        wanted = loaded_part(model, names[0], tensor)
        return combined([_compared(part.copies(), wanted) for part in parts])

    def differing_factors(self, adapter: int, scaling: float, factors: NamedTensors) -> list[str]:
        """Return the names of an adapter's factors whose served bits differ from those that loading
        `factors` gives at this worker; the padding of a rank must be zero.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        differing: list[str] = []
        for name, factor in factors:
            factor_scaling = scaling if name.endswith(HIGH) else 1.0
            served = served_factors(manager, adapter, name, factor)
            if not all(_is_factor(copy, mine, factor_scaling) for copy, mine in served):
                differing.append(name)
        return differing


def _compared(copies: list[torch.Tensor], wanted: torch.Tensor) -> PartState:
    if not copies:
        return "unread"
    return "same" if all(_is_same(copy, wanted) for copy in copies) else "differs"


def _is_factor(served: torch.Tensor, factor: torch.Tensor, scaling: float) -> bool:
    rows, columns = factor.shape
    wanted = torch.zeros(served.shape, dtype=served.dtype)
    # vLLM multiplies in the served type, on the CPU.
    scaled = factor.cpu().to(served.dtype)
    wanted[:rows, :columns] = scaled if scaling == 1 else scaled * scaling
    return torch.equal(_bits(served.cpu()), _bits(wanted))


def _is_same(served: torch.Tensor, tensor: torch.Tensor) -> bool:
    wanted = tensor.to(device=served.device, dtype=served.dtype)
    return torch.equal(_bits(served), _bits(wanted))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers, so that −0 differs from +0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
