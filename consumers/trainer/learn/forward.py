"""Scores the trained tokens of a micro-batch: computes their log-probability and entropy under the
model's present parameters. `policy_scorer(model)` returns the function that maps the tokens
(`TokenRows` of `row_layout.py`) to `TokenScores`. It is the fast path of the architecture if there
is one (`llama.py`), else transformers' own forward, with the sequences laid out in rows as a trial
of the model allows (`row_form`). Both return the same numbers up to rounding, are differentiable in
the model's parameters, and may be called from several threads at once.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rollstream.consumers.trainer.learn.llama import PackedDecoder, has_packed_form
from rollstream.consumers.trainer.learn.row_layout import TokenRows, token_grid
from rollstream.consumers.trainer.learn.scores import (
    Float32Head,
    TokenScores,
    body_of,
    score_through,
)
from rollstream.errors import ConfigurationError

FIRST, SECOND = 5, 7
"""Lengths in tokens of two test sequences. `check_trainable`, `can_pack` and `join_sequences` run
the model on them before training (a trial), because no field of a model's configuration shows
reliably what its forward does.
"""
TOLERANCE = 1e-3
"""The largest relative difference of two results that count as equal. Rounding in float32 is far
below it; the error of attending to one token of another sequence is far above it.
"""
TOLERANCE_BFLOAT16 = 3e-2


def check_trainable(model: PreTrainedModel, tolerance: float = TOLERANCE) -> None:
    """Raise `ConfigurationError` unless `model` is causal and its logits equal those that
    `Float32Head` computes from the states of its body (the model without its head). Every score
    depends on both.
    """
    body, tokens = body_of(model), _tokens(model)
    with _trial(model):
        states = _hidden(body, tokens)
        start = _hidden(body, tokens[:, :FIRST])
        # The class's own forward: hooks of `fully_shard` run once, around the whole trial.
        logits = type(model).forward(model, input_ids=tokens, use_cache=False).logits[0]
        ours = Float32Head(model)(states[0])
    if _differ(states[:, :FIRST], start, tolerance):
        raise _refusal(model, "a token's state depends on the tokens after it: it is not causal")
    if _differ(logits, ours, tolerance):
        raise _refusal(model, "its logits are not its head's product with the body's last states")


def can_pack(model: PreTrainedModel, tolerance: float = TOLERANCE) -> bool:
    """Whether `model` keeps sequences apart that share a row of its input, where the positions of
    each restart at 0: no token's state depends on another sequence.

    transformers 5 makes masks that separate such sequences (masking_utils.py,
    `find_packed_sequence_indices`, given no mask and no cache), but only for models that pass their
    positions to it: OPT does not, ALiBi has none, state-space models carry their state across.
    """
    body, tokens = body_of(model), _tokens(model)
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(tokens.device)
    with _trial(model):
        alone = _hidden(body, tokens[:, FIRST:])
        try:
            packed = _hidden(body, tokens, positions)
        except TypeError:  # a forward without positions
            return False
    return not _differ(packed[:, FIRST:], alone, tolerance)


RowForm = Literal["padded", "packed", "joined"]
"""How sequences are laid out as input of the body. `padded`: one row for each. `packed`: several in
a row, kept apart by masks that transformers builds where positions restart (`can_pack`). `joined`:
all in one row, kept apart by their lengths (`attend_joined`).
"""


def row_form(model: PreTrainedModel, joins: bool, tolerance: float = TOLERANCE) -> RowForm:
    """Checks `model` (`check_trainable`), and returns `packed` if it computes that form correctly,
    else `padded`. With `joins` (`trainer.varlen_attention`) it makes the model attend by
    `attend_joined` and returns `joined`. Raises `ConfigurationError` if the model cannot be trained
    so, or if torch cannot compile its layers.
    """
    try:
        check_trainable(model, tolerance)
    except RuntimeError as error:
        if not type(error).__module__.startswith(COMPILER_MODULES):
            raise
        first = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"trainer.compile: torch cannot compile a layer here; set it to false ({first})"
        ) from error
    if joins:
        join_sequences(model, tolerance)
        return "joined"
    return "packed" if can_pack(model, tolerance) else "padded"


def try_sharded(model: PreTrainedModel, compute: str, joins: bool = False) -> RowForm:
    """Returns the `row_form` of a model whose parameters are split over ranks (`fully_shard`). All
    ranks must call it. The trial runs inside one call of `model`, because the ranks gather the
    parameters only there. `compute` is the type in which the body computes.
    """
    model.forward = MethodType(_forward, model)
    with _trial(model):
        tolerance = TOLERANCE if compute == "float32" else TOLERANCE_BFLOAT16
        return model(trial=tolerance, joins=joins)


COMPILER_MODULES = ("torch._dynamo", "torch._inductor")
"""Modules of torch's compiler. Errors are recognised by these names, because an import of their
classes would import the compiler, which costs a second and memory.
"""
JOINED = "rollstream_joined"
"""Name of `attend_joined` among transformers' attention functions."""


def join_sequences(model: PreTrainedModel, tolerance: float = TOLERANCE) -> None:
    """Make `model` attend by `attend_joined`. Raises `ConfigurationError` unless sequences that are
    joined in one row then have the states that each has alone.
    """
    body, tokens = body_of(model), _tokens(model)
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(tokens.device)
    joined: Tensor | None = None
    with _trial(model):
        alone = [_hidden(body, part) for part in tokens.split((FIRST, SECOND), 1)]
        if model._can_set_attn_implementation():  # pyright: ignore[reportPrivateUsage]
            model.set_attn_implementation(JOINED)
            bounds = _bounds((FIRST, SECOND))
            with suppress(TypeError):  # a forward without positions or lengths, or capped scores
                joined = _hidden(body, tokens, positions, cu_seq_lens_q=bounds)
    if joined is None or _differ(joined, torch.cat(alone, 1), tolerance):
        raise ConfigurationError(
            f"trainer.varlen_attention: {type(model).__name__} does not pass the lengths of joined "
            "sequences to its attention, or changes its scores; set it to false"
        )


def _bounds(lengths: Sequence[int]) -> Tensor:
    """Returns the indices [n + 1] at which n sequences of these lengths begin in one row, and the
    end of the last one, in host memory.
    """
    return torch.tensor([0, *accumulate(lengths)])


def attend_joined(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence of a row, as an attention function of
    transformers: `query` is [B, heads, N, D], the result [B, N, heads, D]. Sequences begin and end
    at the indices `cu_seq_lens_q` (None: one sequence); a token sees at most `sliding_window`
    tokens, if it is given. No mask over N × N is made: the work is that of the sequences alone.
    Raises `TypeError` for a mask or capped scores, which it cannot apply.

    `torch.nn.attention.varlen` does the same in one kernel for 16-bit tensors on CUDA; it is not
    used, since it has not been run here.
    """
    if attention_mask is not None or others.get("softcap") is not None:
        raise TypeError("attention with a mask or capped scores")
    bounds: Tensor | None = others.get("cu_seq_lens_q")
    sliding_window: int | None = others.get("sliding_window")
    lengths = [query.shape[2]] if bounds is None else bounds.diff().tolist()
    parts: list[Tensor] = []
    for q, k, v in zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True):
        mask = None
        if sliding_window is not None and sliding_window < q.shape[2]:
            at = torch.arange(q.shape[2], device=q.device)
            distance = at[:, None] - at
            mask = (distance >= 0) & (distance < sliding_window)
        is_grouped = q.shape[1] != k.shape[1]
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
            )
        )
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(JOINED, attend_joined)


def _tokens(model: PreTrainedModel) -> Tensor:
    """Returns the tokens [1, FIRST + SECOND] of both test sequences in one row."""
    embeddings: Any = model.get_input_embeddings()
    return (torch.arange(FIRST + SECOND) % embeddings.weight.shape[0])[None].to(model.device)


def _hidden(
    body: Callable[..., Any], tokens: Tensor, positions: Tensor | None = None, **others: Tensor
) -> Tensor:
    """Returns the last states of the body for these tokens."""
    arguments = others if positions is None else {"position_ids": positions, **others}
    return body(input_ids=tokens, use_cache=False, **arguments)[0]


@contextmanager
def _trial(model: PreTrainedModel) -> Generator[None]:
    """Run the block without gradients and without dropout, then restore the model's mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _differ(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((actual - expected).norm()) > tolerance * float(expected.norm())


def _refusal(model: PreTrainedModel, why: str) -> ConfigurationError:
    return ConfigurationError(f"model: {type(model).__name__} cannot be trained: {why}")


PolicyScorer = Callable[[TokenRows], TokenScores]
"""Scores a micro-batch under the model's parameters at the time of the call."""


def policy_scorer(
    model: PreTrainedModel,
    general: bool = False,
    recomputes: bool = False,
    joins: bool = False,
    compiles: bool = False,
    keeps_states: bool = False,
) -> PolicyScorer:
    """Returns the fastest scorer for this model. Raises `ConfigurationError` if the model cannot be
    trained with these options.

    The fast path (`llama.py`) computes in float32 and joins sequences by itself; `general` and
    `compiles` exclude it. `compiles`: torch compiles the layers (`compile_layers`). `recomputes`: a
    layer keeps only its input for the backward pass. `joins`: on the general path all sequences
    share one row (`join_sequences`). `keeps_states`: the scores have `TokenScores.states`. The
    trial of the model needs float32 parameters; their type may change afterwards.
    """
    if has_packed_form(model) and not general and not compiles:
        return PackedDecoder(model, recomputes, keeps_states).score
    if compiles:
        compile_layers(model)
    if recomputes:
        recompute_layers(model)
    form = row_form(model, joins)
    return lambda rows: forward_scores(model, rows, form, keeps_states)


def forward_scores(
    model: PreTrainedModel, rows: TokenRows, form: RowForm = "padded", keeps_states: bool = False
) -> TokenScores:
    """Returns scores by transformers' forward, in a form that `row_form` found. This is the general
    path, for every causal decoder that passes `check_trainable`, also one that is split over ranks
    by `fully_shard` (FSDP).

    It makes exactly one call of `model`, whatever the rows, and does everything inside that call
    (`_forward`): the body runs once, the states that predict trained tokens are selected, and head
    and softmax are computed for them in float32, in slices. So hooks on `model` and its layers see
    an ordinary forward, and ranks with unequal work run equal collectives. Under FSDP the head must
    be in `model`'s root group, not in a group of its own. The body computes in the type of its
    parameters; for bfloat16 the caller casts them.
    """
    if "forward" not in vars(model):
        model.forward = MethodType(_forward, model)
    return model(rows=rows, form=form, keeps_states=keeps_states)


def _forward(
    model: PreTrainedModel,
    *args: Any,
    rows: TokenRows | None = None,
    form: RowForm = "padded",
    trial: float | None = None,
    joins: bool = False,
    keeps_states: bool = False,
    **kwargs: Any,
) -> Any:
    """Replaces the model's `forward`. Called with `rows` it returns their scores; called with the
    tolerance of a `trial`, the `row_form`; otherwise the result of the model's own forward.
    """
    if trial is not None:
        return row_form(model, joins, trial)
    if rows is None:
        return type(model).forward(model, *args, **kwargs)
    hidden = scored_states(model, rows, form)
    head = Float32Head(model)
    scores = score_through(head, head.size, hidden, rows.targets, rows.temperature)
    return scores._replace(states=hidden) if keeps_states else scores


def scored_states(model: PreTrainedModel, rows: TokenRows, form: RowForm) -> Tensor:
    """Returns the last states [G, d] of the body that predict the trained tokens, computed in a
    form that `row_form` found.
    """
    grid = token_grid(rows, form != "padded", sum(rows.lengths) if form == "joined" else None)
    if form == "padded":
        places = {"attention_mask": grid.mask}
    else:
        places = {"position_ids": grid.positions}
    if form == "joined":
        places["cu_seq_lens_q"] = _bounds(rows.lengths)
    states = body_of(model)(input_ids=grid.tokens, use_cache=False, **places)[0]
    return states.flatten(0, 1).index_select(0, grid.scored)


def recompute_layers(model: nn.Module) -> None:
    """Make every decoder layer of `model` keep only its inputs and recompute its activations in the
    backward pass (gradient checkpointing); gradients stay the same.

    The activation memory of a pass is then that of one layer instead of all (Chen et al., "Training
    Deep Nets with Sublinear Memory Cost", arXiv 1604.06174), for a third more work. transformers'
    own switch acts only on modules in training mode, which also turns dropout on. The trained
    policy must be the sampled one, so the model stays in evaluation mode and the layers are wrapped
    here.

    Only the layers' `forward` is replaced, so hooks on their call (those of `fully_shard`) run
    once, outside of the recomputation. Call this function before such hooks are set.
    """
    for layer in _layers(model, "trainer.gradient_checkpointing"):
        layer.forward = partial(_recomputed, layer.forward)


def compile_layers(model: nn.Module) -> None:
    """Make torch compile the forward of every decoder layer of `model`, once for sequences of all
    lengths; `recompute_layers` may follow. The first pass compiles, and raises an error of
    `COMPILER_MODULES` where this machine has no compiler.

    Results differ from those of the uncompiled layers by rounding. If torch compiles again for
    other lengths, the new code may round differently too.
    """
    for layer in _layers(model, "trainer.compile"):
        layer.forward = torch.compile(layer.forward, dynamic=True)
    # Its loop depends on the number of sequences, so torch would compile it again for each number.
    AttentionInterface.register(JOINED, torch.compiler.disable(attend_joined))


def _layers(model: nn.Module, setting: str) -> Sequence[nn.Module]:
    """Returns the decoder layers; raises `ConfigurationError`, which names `setting`, if none."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{setting}: {type(model).__name__} has no layers that transformers marks as such; set "
            "it to false"
        )
    return layers


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a layer's `own` forward, recomputed in the backward pass if there will be one."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def device_of(name: str) -> torch.device:
    """Returns the device of the setting `trainer.device`: `cpu`, `cuda`, `cuda:N` or `auto` (CUDA
    if there is a device, else the CPU). Raises `ConfigurationError` if this machine has no such
    device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigurationError(
            f"trainer.device must be a device of this machine, got {name!r}: PyTorch sees {count} "
            "CUDA devices here; set it to 'cpu' or 'auto', or install a CUDA build of PyTorch"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
