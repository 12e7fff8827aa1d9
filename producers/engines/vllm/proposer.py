"""Proposes drafts inside vLLM's worker from the history of the rollouts, as a proposer of vLLM's
kind `custom_class`.

vLLM calls it after every step and verifies its drafts with its own sampler: a wrong draft costs
time and changes no distribution. Without a history there are no drafts. vLLM does not pass the
requests to it, so it reads vLLM's batch (model runner V1, the one that takes custom proposers).
`proposer_speculation.py` chooses the drafts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.index import DraftSource
from rollstream.producers.engines.vllm.proposer_speculation import (
    DraftCounters,
    ProposerSpeculation,
    SteppedRequest,
)

PROPOSER_CLASS = "rollstream.producers.engines.vllm.proposer.HistoryProposer"
_ARGUMENTS = "rollstream_prompt", "rollstream_group", "rollstream_place", "rollstream_stay"


def request_arguments(prompt: int, group: int, place: int, stay: int) -> dict[str, int]:
    """Return the extra arguments of a request to vLLM, which identify its sequence in the history
    and in the draft counters.
    """
    return dict(zip(_ARGUMENTS, (prompt, group, place, stay), strict=True))


def draft_config(drafts: int, slots: int, on_cpu: bool) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config` for at most `drafts` tokens per draft; None: no drafts.

    vLLM pads a request that enters with one token to compute by that many drafts of −1, so that
    CUDA graphs fit. It does not pad if the number is given per batch size, so on the CPU the number
    is given that way.
    """
    if not drafts:
        return None
    config: dict[str, Any] = {"method": "custom_class", "model": PROPOSER_CLASS}
    config["num_speculative_tokens"] = drafts
    if on_cpu:
        config["num_speculative_tokens_per_batch_size"] = [(1, slots, drafts)]
    return config


class HistoryProposer:
    """Implements the methods that vLLM calls, and `draft_from`, which our worker calls."""

    def __init__(self, vllm_config: Any) -> None:
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._runner: Any = None
        self._speculation: ProposerSpeculation | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """Does nothing: drafts come from no model."""

    def draft_from(
        self,
        runner: Any,
        speculation: tuple[DraftSource, DraftGate, Any, DraftCounters | None] | None,
    ) -> None:
        """Draft from the source of `speculation`, under its gate and by its clock, and write the
        counts to its counters; with None, stop drafting.

        vLLM would propose zeros for the whole batch as soon as one sequence is within a longest
        draft of the end of its context. The drafts made here end before the context does, so that
        limit is raised.
        """
        self._runner = runner
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
        self._speculation = None
        if speculation is not None:
            source, gate, clock, counters = speculation
            self._speculation = ProposerSpeculation(source, gate, self._vocabulary, clock, counters)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the drafts of all rows of the batch; vLLM passes the arguments by position as to
        its other proposers.
        """
        if self._speculation is None or self._speculation.can_skip(
            self._runner.input_batch.req_ids
        ):
            return [[] for _ in sampled_token_ids]
        rows = enumerate(sampled_token_ids)
        return self._speculation.step(
            [
                self._seen(i, gained, token_ids_cpu[i, : int(num_tokens_no_spec[i])])
                for i, gained in rows
            ]
        )

    def _seen(self, row: int, sampled: Sequence[int], tokens: NDArray[np.int32]) -> SteppedRequest:
        """Return the row after the step. vLLM drops tokens after a stop token, and pads drafts
        with −1.
        """
        batch = self._runner.input_batch
        request = self._runner.requests[batch.req_ids[row]]
        asked, verified = request.sampling_params, batch.spec_token_ids[row]
        ends = [at for at, token in enumerate(sampled, 1) if token in asked.stop_token_ids]
        gained = sampled[: ends[0]] if ends else sampled
        tokens = tokens[: len(tokens) - len(sampled) + len(gained)]
        end = min(request.num_prompt_tokens + asked.max_tokens, self._runner.max_model_len)
        prompt, group, place, stay = (asked.extra_args[name] for name in _ARGUMENTS)
        return SteppedRequest(
            batch.req_ids[row],
            prompt,
            group,
            verified if verified and verified[0] >= 0 else (),
            gained,
            tokens,
            0 if ends else end - len(tokens),
            place,
            stay,
        )
