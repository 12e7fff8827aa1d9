"""Speculative decoding inside vLLM's worker, beside the proposer: setting the history to draft
from, and a correction of the sampler.

vLLM 0.32 without triton reads temperatures, top-k and top-p of drafted positions from memory that
was never written (upstream issue 55005): its kernel for the CPU writes into a copy that is never
read. The function that calls the kernel is replaced where triton is missing. A runner that can
verify drafts runs verification in every step, also without drafts: on the CPU such a step is made a
plain one.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import time
from typing import Any

import torch

from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.merged import CombinedSource, running_tokens
from rollstream.producers.drafts.shared import SharedHistory
from rollstream.producers.drafts.source_part import DraftSource
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.windows import WINDOW_RULES
from rollstream.producers.engines.vllm.release import HAS_TRITON, rejection_sampler
from rollstream.producers.engines.vllm.tally import DraftCounters

NODE_TOKENS = 1 << 18  # tokens of a node's history, the default of rollouts.drafts_tokens


class DraftingWorker:
    """Methods of vLLM's worker, whose attributes they use."""

    model_runner: Any
    rank: int

    def draft_from(
        self, source: DraftSource | str | None, window: str, forced: bool | None, tally: str
    ) -> None:
        """Draft from this history, or from the one in this file; with None, stop drafting. Of
        several workers vLLM uses the first one's drafts, so only that one writes counts.
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
        switch = DraftGate(WINDOW_RULES[window], forced)
        if runner.device.type == "cpu":
            skip_empty_verification(runner)
        told = DraftCounters(tally) if self.rank == 0 else None
        runner.drafter.draft_from(runner, (source, switch, clock, told))


def skip_empty_verification(runner: Any) -> None:
    """Make steps without drafts plain ones from here on: rejection sampling of no drafts takes a
    small model a tenth of a step or more. Idempotent.
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
    """Replace the wrong function of vLLM; does nothing where triton is installed."""
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
