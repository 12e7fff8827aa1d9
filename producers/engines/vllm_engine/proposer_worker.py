"""What drafts need inside vLLM's worker beside the proposer: a way to say what to guess from, and a
sampler that is right.

vLLM 0.32 without triton reads temperatures, top-k and top-p of drafted positions from memory that
was never written (upstream issue 55005): its kernel for the CPU writes into a copy that nobody
reads. The function that calls it is replaced where triton is missing.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import time
from dataclasses import asdict
from typing import Any

import torch

from producers.engines.drafts.source import DraftSource
from producers.engines.drafts.switch import Switch
from producers.engines.drafts.windows import RULES
from producers.engines.vllm_engine.proposer_history import MappedHistory
from producers.engines.vllm_engine.release import HAS_TRITON, rejection_sampler


class DraftingWorker:
    """Methods of vLLM's worker, whose attributes they use."""

    model_runner: Any

    def draft_from(
        self, source: DraftSource | str | None, window: str, forced: bool | None
    ) -> None:
        """Guess from this history, from another process by its file; None: not any more."""
        runner = self.model_runner
        if source is None:
            runner.drafter.draft_from(runner, None)
            return
        # A neighbour on the machine costs a CPU time, but no work of this thread.
        clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
        if isinstance(source, str):
            source = MappedHistory(source, runner.max_num_reqs * runner.max_model_len)
        switch = Switch(RULES[window], forced)
        runner.drafter.draft_from(runner, (source, switch, clock))

    def drafted(self) -> dict[str, float]:
        """The fields of `DraftStats`."""
        return asdict(self.model_runner.drafter.stats())


def mend_sampler() -> None:
    """Once per process; nothing where triton is there."""
    if not HAS_TRITON:
        rejection_sampler.expand_batch_to_tokens = expanded


def expanded(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """A value per request as one per drafted token, `replace_from` being `replace_to` there."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, replace_to, x)
    return values.repeat_interleave(counts, output_size=num_tokens)
