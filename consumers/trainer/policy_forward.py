"""Scores of a micro-batch's trained tokens under the model as it is: a fast form where there is
one, else transformers' own forward.

`policy_of(model)` gives a `Policy`, `Rows` → `Scores`: the seam between samples and loss. Both
forms give the same numbers up to rounding, differentiable in the model's parameters, and may be
called from several threads at once.

`forward_scores(model, rows)` is the general form, for any causal decoder that `check_trainable`
took, also under `fully_shard`. It is exactly one call of `model` itself, whatever the rows, and
everything happens inside it: body once, trained rows selected, head and softmax in float32, in
slices. So hooks on `model` and its layers see an ordinary forward, and ranks with unequal work make
equal collectives. The head must lie in `model`'s own group, not in one of its own. The body
computes in the type of its parameters; whoever wants bfloat16 casts those.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable
from types import MethodType
from typing import Any

from transformers import PreTrainedModel

from consumers.trainer.float32_head import Float32Head, body_of
from consumers.trainer.grid import grid_of
from consumers.trainer.layout import Rows
from consumers.trainer.packed_decoder import PackedDecoder, has_packed_form
from consumers.trainer.packing_probe import can_pack, check_trainable
from consumers.trainer.scoring import Scores, score_through

Policy = Callable[[Rows], Scores]


def policy_of(model: PreTrainedModel, general: bool = False) -> Policy:
    """The fastest form that this model has, `general` where that would not do: the fast one
    computes in float32 and keeps every activation. `model` is float32 now; its parameters may
    change type later. `ConfigurationError` for what cannot be trained.
    """
    if has_packed_form(model) and not general:
        return PackedDecoder(model).score
    check_trainable(model)
    packed = can_pack(model)
    return lambda rows: forward_scores(model, rows, packed)


def forward_scores(model: PreTrainedModel, rows: Rows, packed: bool = False) -> Scores:
    """Scores through transformers' forward; `packed` (only where `can_pack`) puts several sequences
    in a row of it, else each is padded to the longest.
    """
    if "forward" not in vars(model):
        model.forward = MethodType(_forward, model)
    return model(rows=rows, packed=packed)


def _forward(
    model: PreTrainedModel,
    *args: Any,
    rows: Rows | None = None,
    packed: bool = False,
    **kwargs: Any,
) -> Any:
    """The model's own forward, or scores where it is called with rows."""
    if rows is None:
        return type(model).forward(model, *args, **kwargs)
    grid = grid_of(rows, packed)
    places = {"position_ids": grid.positions} if packed else {"attention_mask": grid.mask}
    states = body_of(model)(input_ids=grid.tokens, use_cache=False, **places)[0]
    hidden = states.flatten(0, 1).index_select(0, grid.scored)
    head = Float32Head(model)
    return score_through(head, head.size, hidden, rows.targets, rows.temperature)
