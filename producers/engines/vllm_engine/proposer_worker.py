"""What drafts need inside vLLM's worker beside the proposer: a way to say what to guess from, and a
sampler that is right.

vLLM 0.32 without triton reads temperatures, top-k and top-p of drafted positions from memory that
was never written (upstream issue 55005): its kernel for the CPU writes into a copy that nobody
reads. The function that calls it is replaced where triton is missing. And a runner that may verify
drafts does so in every step, also where there are none: on the CPU such a step is made a plain one.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import time
from typing import Any

import torch

from producers.engines.drafts.history import History
from producers.engines.drafts.merged import WithRunning, running_tokens
from producers.engines.drafts.shared import SharedHistory
from producers.engines.drafts.source import DraftSource
from producers.engines.drafts.switch import Switch
from producers.engines.drafts.windows import RULES
from producers.engines.vllm_engine.release import HAS_TRITON, rejection_sampler
from producers.engines.vllm_engine.tally import Tally

NODE_TOKENS = 1 << 18  # of a node's history, unless the run wants another


class DraftingWorker:
    """Methods of vLLM's worker, whose attributes they use."""

    model_runner: Any
    rank: int

    def draft_from(
        self, source: DraftSource | str | None, window: str, forced: bool | None, tally: str
    ) -> None:
        """Guess from this history, from another process by its file; None: not any more. Of several
        workers vLLM takes the first one's guesses, so that one says what they come to.
        """
        runner = self.model_runner
        if source is None:
            runner.drafter.draft_from(runner, None)
            return
        # A neighbour on the machine costs a CPU time, but no work of this thread.
        clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
        if isinstance(source, str):
            most = running_tokens(runner.max_num_reqs, runner.max_model_len, NODE_TOKENS)
            source = WithRunning(SharedHistory(source), History(most))
        switch = Switch(RULES[window], forced)
        if runner.device.type == "cpu":
            step_plainly(runner)
        told = Tally(tally) if self.rank == 0 else None
        runner.drafter.draft_from(runner, (source, switch, clock, told))


def step_plainly(runner: Any) -> None:
    """From here on, where nothing was guessed: a small model spends a tenth of a step or more on
    sampling by rejection of no drafts. Of this runner once.
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
