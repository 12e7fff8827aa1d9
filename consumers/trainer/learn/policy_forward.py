"""Scores a micro-batch's trained tokens under the model's present parameters: by a fast path where
the architecture has one, else by transformers' own forward.

`policy_of(model)` returns a `PolicyScorer` (`TokenRows` → `TokenScores`), the boundary between samples and loss.
Both paths return the same numbers up to rounding, are differentiable in the model's parameters and
may be called from several threads at once.

`forward_scores(model, rows)` is the general path, for every causal decoder that passes
`check_trainable`, also under `fully_shard`. It makes exactly one call of `model`, whatever the
rows, and does everything inside that call: body once, trained rows selected, head and softmax in
float32, in slices. So hooks on `model` and its layers see an ordinary forward, and ranks with
unequal work run equal collectives. Under FSDP the head must be in `model`'s root group, not in a
group of its own. The body computes in the type of its parameters; for bfloat16 the caller casts
them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable
from types import MethodType
from typing import Any

from transformers import PreTrainedModel

from rollstream.consumers.trainer.learn.scores import Float32Head, body_of
from rollstream.consumers.trainer.learn.grid import token_grid
from rollstream.consumers.trainer.learn.row_layout import TokenRows
from rollstream.consumers.trainer.learn.llama import PackedDecoder, has_packed_form
from rollstream.consumers.trainer.learn.forward import can_pack, check_trainable
from rollstream.consumers.trainer.learn.scoring import TokenScores, score_through

PolicyScorer = Callable[[TokenRows], TokenScores]


def policy_scorer(model: PreTrainedModel, general: bool = False) -> PolicyScorer:
    """The fastest path for this model. `general` excludes the fast one, which computes in float32
    and keeps every activation. `model` is float32 now; its parameters may change type later. Raises
    `ConfigurationError` if the model cannot be trained.
    """
    if has_packed_form(model) and not general:
        return PackedDecoder(model).score
    check_trainable(model)
    packed = can_pack(model)
    return lambda rows: forward_scores(model, rows, packed)


def forward_scores(model: PreTrainedModel, rows: TokenRows, packed: bool = False) -> TokenScores:
    """Scores by transformers' forward. `packed` (only where `can_pack`) puts several sequences into
    one row of the batch; otherwise each sequence is padded to the longest.
    """
    if "forward" not in vars(model):
        model.forward = MethodType(_forward, model)
    return model(rows=rows, packed=packed)


def _forward(
    model: PreTrainedModel,
    *args: Any,
    rows: TokenRows | None = None,
    packed: bool = False,
    **kwargs: Any,
) -> Any:
    """The model's own forward, or scores if it is called with `rows`."""
    if rows is None:
        return type(model).forward(model, *args, **kwargs)
    grid = token_grid(rows, packed)
    places = {"position_ids": grid.positions} if packed else {"attention_mask": grid.mask}
    states = body_of(model)(input_ids=grid.tokens, use_cache=False, **places)[0]
    hidden = states.flatten(0, 1).index_select(0, grid.scored)
    head = Float32Head(model)
    return score_through(head, head.size, hidden, rows.targets, rows.temperature)
