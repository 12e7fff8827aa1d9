"""Scores of a micro-batch's trained tokens under the masters: a fast form where there is one, else
the model's own.

Both give the same numbers up to rounding, differentiable in the model's parameters, and may be
called from several threads at once.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from consumers.trainer.layout import Rows
from consumers.trainer.packed_decoder import PackedDecoder, has_packed_form
from consumers.trainer.scoring import Scores, score

Policy = Callable[[Rows], Scores]


def policy_of(model: PreTrainedModel) -> Policy:
    """The fastest form that this model has."""
    if has_packed_form(model):
        return PackedDecoder(model).score
    return lambda rows: forward_scores(model, rows)


def forward_scores(model: PreTrainedModel, rows: Rows) -> Scores:
    """Scores through transformers' forward, one call per block, for any causal decoder."""
    logits: list[Tensor] = []
    first = 0
    for block in rows.blocks:
        end = block.start + block.sequences * block.length
        lengths = torch.tensor(rows.lengths[first : first + block.sequences])
        first += block.sequences
        output = model(
            input_ids=rows.tokens[block.start : end].unflatten(0, (-1, block.length)),
            attention_mask=(torch.arange(block.length) < lengths[:, None]).long(),
            use_cache=False,
        )
        logits.append(output.logits.flatten(0, 1))
    scored = torch.cat(logits).index_select(0, rows.scored)
    return score(scored, rows.targets, rows.temperature)
