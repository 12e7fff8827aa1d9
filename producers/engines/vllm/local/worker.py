"""Extends vLLM's worker, which imports this module (`worker_extension_cls`). The import registers
`VersionTransfer`, replaces a faulty function of the sampler (`patch_sampler`), and makes a worker
process end with its rollout (`end_with_parent`).
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
from rollstream.producers.drafts.node import CombinedSource, SharedHistory, running_tokens
from rollstream.producers.engines.drafting import DraftSource
from rollstream.producers.engines.settings import DRAFTS_TOKENS
from rollstream.producers.engines.vllm.local.parameter_map import (
    PartState,
    combined,
    served_factors,
    served_part,
)
from rollstream.producers.engines.vllm.local.proposer_speculation import DraftCounters
from rollstream.producers.engines.vllm.local.release import (
    HAS_TRITON,
    WeightTransferEngineFactory,
    rejection_sampler,
)
from rollstream.producers.engines.vllm.local.staging import (
    NamedTensors,
    StagedTensor,
    staged_tensors,
)
from rollstream.producers.engines.vllm.local.transfer import (
    VersionTransfer,
    is_elsewhere,
    loaded_part,
)
from rollstream.storage.model_folder.lora import HIGH


class DraftingWorker:
    model_runner: Any
    rank: int

    def draft_from(
        self, source: DraftSource | str | None, window: str, forced: bool | None, counters_path: str
    ) -> None:
        """Draft from a history, or the path of a node's shared one, beside a private one of the
        running sequences. None stops drafting. `window` names the rule for the length of drafts
        (`WINDOW_RULES`). `forced`: always or never draft; None: a gate decides by measured times.
        """
        runner = self.model_runner
        if source is None:
            runner.drafter.draft_from(runner, None)
            return
        # On a CPU other processes lengthen wall-clock time, but not the time of this thread.
        clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
        if isinstance(source, str):
            tokens_max = running_tokens(runner.max_num_reqs, runner.max_model_len, DRAFTS_TOKENS)
            source = CombinedSource(SharedHistory(source), AnswerHistory(tokens_max))
        gate = DraftGate(WINDOW_RULES[window], forced)
        if runner.device.type == "cpu":
            skip_empty_verification(runner)
        # Of several workers vLLM uses the drafts of the first.
        counters = DraftCounters(counters_path) if self.rank == 0 else None
        runner.drafter.draft_from(runner, (source, gate, clock, counters))


def skip_empty_verification(runner: Any) -> None:
    """Make every later step that has no drafts a plain decode step. Idempotent."""
    if "_prepare_inputs" in vars(runner):
        return
    # vLLM's model runner, once it can verify drafts, verifies in every step, which takes a tenth of
    # a small model's step or more.
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
    """Replace the faulty function `expand_batch_to_tokens` of vLLM by `expand_to_tokens`."""
    # vLLM 0.32 without triton reads temperatures, top-k and top-p of drafted positions from memory
    # that was never written (upstream issue 55005): its kernel for the CPU writes into a copy that
    # is never read.
    if not HAS_TRITON:
        rejection_sampler.expand_batch_to_tokens = expand_to_tokens


def expand_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its drafted tokens; `cu_num_tokens` are running
    totals. A value `replace_from` becomes `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, replace_to, x)
    return values.repeat_interleave(counts, output_size=num_tokens)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the kernel sends a signal when the parent dies
_POLL_S = 0.5  # between two checks for the parent, where the kernel sends no such signal


def end_with_parent() -> None:
    """End this process with its parent, even by `kill -9`, if Python's multiprocessing started
    it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    # Otherwise a worker would continue to compute and keep its memory.
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
    """vLLM's worker, which may serve a part of each tensor, compares served weights and ends failed
    updates.
    """

    weight_transfer_engine: Any
    _weight_update_active: bool

    def give_up_update(self) -> None:
        """End an update that failed between two of its chunks."""
        self._weight_update_active = False
        self.weight_transfer_engine.give_up()

    def call_staged(
        self, method: str, arguments: tuple[Any, ...], path: str, entries: list[StagedTensor]
    ) -> Any:
        """Calls a method of this class, whose last argument is the tensors of the staged file at
        `path`.
        """
        # Tensors reach another process without being sent in the call.
        return getattr(self, method)(*arguments, staged_tensors(path, entries))

    def compare_part(self, names: list[str], tensors: NamedTensors) -> PartState:
        """Compare this worker's part of one tensor, under each of its `names`, with that of the
        whole tensor, the only one of `tensors`.
        """
        ((_, tensor),) = tensors
        model = self.model_runner.get_model()
        parts = [served_part(model, name) for name in names if not is_elsewhere(model, name)]
        if not parts:
            return "elsewhere"
        expected = loaded_part(model, names[0], tensor)
        return combined([_compared(part.copies(), expected) for part in parts])

    def differing_factors(self, adapter: int, scaling: float, factors: NamedTensors) -> list[str]:
        """Returns the factors whose served bits differ from those of loading `factors`. vLLM
        multiplies the second factor by `scaling`, and pads to its largest adapter rank; the padding
        must be zero.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        differing: list[str] = []
        for name, factor in factors:
            factor_scaling = scaling if name.endswith(HIGH) else 1.0
            served = served_factors(manager, adapter, name, factor)
            if not all(_is_factor(copy, mine, factor_scaling) for copy, mine in served):
                differing.append(name)
        return differing


def _compared(copies: list[torch.Tensor], expected: torch.Tensor) -> PartState:
    if not copies:
        return "unread"
    return "same" if all(_is_same(copy, expected) for copy in copies) else "differs"


def _is_factor(served: torch.Tensor, factor: torch.Tensor, scaling: float) -> bool:
    rows, columns = factor.shape
    expected = torch.zeros(served.shape, dtype=served.dtype)
    # vLLM multiplies in the served type, on the CPU.
    scaled = factor.cpu().to(served.dtype)
    expected[:rows, :columns] = scaled if scaling == 1 else scaled * scaling
    return torch.equal(_bits(served.cpu()), _bits(expected))


def _is_same(served: torch.Tensor, tensor: torch.Tensor) -> bool:
    expected = tensor.to(device=served.device, dtype=served.dtype)
    return torch.equal(_bits(served), _bits(expected))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
