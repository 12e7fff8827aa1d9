"""Drafts inside vLLM's worker, as a proposer of its kind `custom_class`. vLLM verifies the drafts
with its own sampler: a wrong one only costs time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.engines.drafting import DraftSource
from rollstream.producers.engines.vllm.local.proposer_speculation import (
    DraftCounters,
    ProposerSpeculation,
    SteppedRequest,
)

PROPOSER_CLASS = "rollstream.producers.engines.vllm.local.proposer.HistoryProposer"
# Names of a request's extra arguments, which vLLM carries from the engine to the proposer.
_ARGUMENTS = "rollstream_prompt", "rollstream_group", "rollstream_place", "rollstream_stay"


def request_arguments(prompt: int, group: int, place: int, stay: int) -> dict[str, int]:
    """`prompt` and `group` select the earlier answers; `stay` is the number of this request to vLLM
    and `place` that of its draft counters.
    """
    return dict(zip(_ARGUMENTS, (prompt, group, place, stay), strict=True))


def draft_config(drafts: int, slots: int, on_cpu: bool) -> dict[str, Any] | None:
    """Returns vLLM's `speculative_config`; None if `drafts` is 0."""
    if not drafts:
        return None
    config: dict[str, Any] = {"method": "custom_class", "model": PROPOSER_CLASS}
    config["num_speculative_tokens"] = drafts
    if on_cpu:
        # vLLM pads a request that enters with a single token by drafts of −1, so that CUDA graphs
        # fit. On the CPU this would cost time for nothing; vLLM does not pad if the number is given
        # per batch size.
        config["num_speculative_tokens_per_batch_size"] = [(1, slots, drafts)]
    return config


class HistoryProposer:
    """vLLM's methods of a proposer, and `draft_from`, before which it proposes none."""

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
        """Start to draft with a source, the gate, its clock, and the counters to write. With None,
        stop drafting.
        """
        self._runner = runner
        # As soon as a draft of full length would not fit into one sequence's context, vLLM gives
        # the whole batch drafts of zeros. No draft of this proposer passes the end of its context,
        # so the limit is raised.
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
        """Returns the next draft of each row, perhaps []. Row i of `token_ids_cpu` begins with the
        `num_tokens_no_spec[i]` tokens of its sequence. vLLM passes the arguments by position.
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
        # vLLM does not pass requests along, so they are read from its batch (model runner V1, the
        # one that takes custom proposers).
        batch = self._runner.input_batch
        request = self._runner.requests[batch.req_ids[row]]
        params, verified = request.sampling_params, batch.spec_token_ids[row]
        ends = [at for at, token in enumerate(sampled, 1) if token in params.stop_token_ids]
        # vLLM drops tokens after a stop token.
        gained = sampled[: ends[0]] if ends else sampled
        tokens = tokens[: len(tokens) - len(sampled) + len(gained)]
        end = min(request.num_prompt_tokens + params.max_tokens, self._runner.max_model_len)
        prompt, group, place, stay = (params.extra_args[name] for name in _ARGUMENTS)
        return SteppedRequest(
            batch.req_ids[row],
            prompt,
            group,
            # vLLM pads with drafts of −1.
            verified if verified and verified[0] >= 0 else (),
            gained,
            tokens,
            0 if ends else end - len(tokens),
            place,
            stay,
        )
