"""Scores the trained tokens of a micro-batch: by the architecture's fast path (`llama.py`), else by
transformers' own forward, in rows as a trial of the model allows (`row_form`). Both give the same
numbers up to rounding, differentiable, from several threads at once.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn.llama import PackedDecoder, has_packed_form
from rollstream.consumers.trainer.learn.row_layout import TokenRows, token_grid
from rollstream.consumers.trainer.learn.scores import (
    Float32Head,
    TokenScores,
    allowed_of,
    body_of,
    score_through,
)
from rollstream.errors import ConfigurationError

FIRST, SECOND = 5, 7
"""Lengths in tokens of two test sequences: no field of a model's configuration shows reliably what
its forward does.
"""
TOLERANCE = 1e-3
"""Relative: far above rounding in float32, far below the error of attending to one token of another
sequence.
"""
TOLERANCE_BFLOAT16 = 3e-2


def check_trainable(model: PreTrainedModel, tolerance: float = TOLERANCE) -> None:
    """Raises `ConfigurationError` unless `model` is causal and its logits equal those of
    `Float32Head` on its body's states: every score depends on both.
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
    """Whether `model` keeps sequences in one row apart, where the positions of each
    restart at 0.
    """
    body, tokens = body_of(model), _tokens(model)
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(tokens.device)
    with _trial(model):
        alone = _hidden(body, tokens[:, FIRST:])
        try:
            # transformers 5 makes such masks (masking_utils.py, `find_packed_sequence_indices`,
            # given no mask and no cache) only for models that pass their positions to it: OPT does
            # not, ALiBi has none, state-space models carry their state across.
            packed = _hidden(body, tokens, positions)
        except TypeError:  # a forward without positions
            return False
    return not _differ(packed[:, FIRST:], alone, tolerance)


RowForm = Literal["padded", "packed", "joined"]
"""`padded`: one row for each sequence. `packed`: several in a row, kept apart by masks that
transformers builds where positions restart. `joined`: all in one row, kept apart by their lengths
(`attend_joined`).
"""


def row_form(model: PreTrainedModel, joins: bool, tolerance: float = TOLERANCE) -> RowForm:
    """`joined` with `joins` (`trainer.varlen_attention`), else `packed` if `model` computes that
    form correctly, else `padded`. Raises `ConfigurationError` if it cannot be trained so, or if
    torch cannot compile its layers.
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
    """The `row_form` of a model split over ranks (`fully_shard`), whose body computes in `compute`.
    A collective.
    """
    model.forward = MethodType(_forward, model)
    # Inside one call of `model`: only there the ranks gather the parameters.
    with _trial(model):
        tolerance = TOLERANCE if compute == "float32" else TOLERANCE_BFLOAT16
        return model(trial=tolerance, joins=joins)


COMPILER_MODULES = ("torch._dynamo", "torch._inductor")
"""Errors are recognised by these names: importing their classes would import the compiler, which
costs a second and memory.
"""
JOINED = "rollstream_joined"
"""Name of `attend_joined` among transformers' attention functions."""


def join_sequences(model: PreTrainedModel, tolerance: float = TOLERANCE) -> None:
    """Makes `model` attend by `attend_joined`. Raises `ConfigurationError` unless joined sequences
    then have the states that each has alone.
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
    # In host memory.
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
    """Returns causal attention within each sequence of a row, as an attention function of
    transformers: `query` is [B, heads, N, D], the result [B, N, heads, D]. Sequences begin and end
    at the indices `cu_seq_lens_q` (None: one sequence); a token sees at most `sliding_window`
    tokens. Raises `TypeError` for a mask or capped scores.
    """
    if attention_mask is not None or others.get("softcap") is not None:
        raise TypeError("attention with a mask or capped scores")
    bounds: Tensor | None = others.get("cu_seq_lens_q")
    sliding_window: int | None = others.get("sliding_window")
    lengths = [query.shape[2]] if bounds is None else bounds.diff().tolist()
    # No mask over N × N: the work is that of the sequences alone. `torch.nn.attention.varlen` does
    # it in one kernel for 16-bit tensors on CUDA; it has not been run here.
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
    embeddings: Any = model.get_input_embeddings()
    return (torch.arange(FIRST + SECOND) % embeddings.weight.shape[0])[None].to(model.device)


def _hidden(
    body: Callable[..., Any], tokens: Tensor, positions: Tensor | None = None, **others: Tensor
) -> Tensor:
    arguments = others if positions is None else {"position_ids": positions, **others}
    return body(input_ids=tokens, use_cache=False, **arguments)[0]


@contextmanager
def _trial(model: PreTrainedModel) -> Generator[None]:
    was_training = model.training
    model.eval()
    try:
        # Evaluation mode: without dropout.
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _differ(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((actual - expected).norm()) > tolerance * float(expected.norm())


def _refusal(model: PreTrainedModel, why: str) -> ConfigurationError:
    return ConfigurationError(f"model: {type(model).__name__} cannot be trained: {why}")


PolicyScorer = Callable[[TokenRows], TokenScores]


def policy_scorer(
    model: PreTrainedModel,
    general: bool = False,
    recomputes: bool = False,
    joins: bool = False,
    compiles: bool = False,
    keeps_states: bool = False,
) -> PolicyScorer:
    """The fastest scorer for this model, whose parameters must be float32. Raises
    `ConfigurationError` if it cannot be trained with these options.

    `general` and `compiles` exclude the fast path. `recomputes`: a layer keeps only its input for
    the backward pass. `joins`: on the general path all sequences share one row. `keeps_states`:
    scores have `states`.
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
    """Scores by transformers' forward, also of a model that `fully_shard` splits over ranks, with
    the head in its root group.

    It makes one call of `model`, whatever the rows, and does everything inside it (`_forward`):
    hooks see an ordinary forward, and ranks with unequal work run equal collectives.
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
    # Replaces the model's `forward`; without `rows` and `trial` the result is the class's own.
    if trial is not None:
        return row_form(model, joins, trial)
    if rows is None:
        return type(model).forward(model, *args, **kwargs)
    hidden = scored_states(model, rows, form)
    head = Float32Head(model)
    allowed = allowed_of(rows.allowed, rows.allowed_row)
    scores = score_through(head, head.size, hidden, rows.targets, rows.temperature, allowed)
    return scores._replace(states=hidden) if keeps_states else scores


def scored_states(model: PreTrainedModel, rows: TokenRows, form: RowForm) -> Tensor:
    """The body's last states [G, d] that predict the trained tokens."""
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
    """Every decoder layer keeps only its inputs for the backward pass, with the same gradients
    (Chen et al., arXiv 1604.06174): the activation memory of one layer, for a third more work. To
    be called before hooks are set on the layers.
    """
    # transformers' own switch acts only in training mode, which turns dropout on: the trained
    # policy would not be the sampled one.
    for layer in _layers(model, "trainer.gradient_checkpointing"):
        # The `forward` alone, so hooks on the call (`fully_shard`) run once, outside of the
        # recomputation.
        layer.forward = partial(_recomputed, layer.forward)


def compile_layers(model: nn.Module) -> None:
    """Torch compiles every decoder layer's forward, once for all lengths; `recompute_layers` may
    follow. The first pass compiles, or raises an error of `COMPILER_MODULES`. Results differ by
    rounding, also after a recompilation.
    """
    for layer in _layers(model, "trainer.compile"):
        layer.forward = torch.compile(layer.forward, dynamic=True)
    # Its loop depends on the number of sequences, so torch would compile it again for each number.
    AttentionInterface.register(JOINED, torch.compiler.disable(attend_joined))


def _layers(model: nn.Module, setting: str) -> Sequence[nn.Module]:
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ConfigurationError(
            f"{setting}: {type(model).__name__} has no layers that transformers marks as such; set "
            "it to false"
        )
    return layers


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # No backward pass follows.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@dataclass(frozen=True, slots=True)
class ScoringForm:
    compute: torch.dtype
    device: torch.device
    general: bool
    joins: bool


def scoring_form(settings: TrainerSettings) -> ScoringForm:
    compute: torch.dtype = getattr(torch, settings.compute)
    general = compute != torch.float32 or settings.compile
    return ScoringForm(compute, device_of(settings.device), general, settings.varlen_attention)


def device_of(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:N` or `auto` (CUDA if there is a device). Raises `ConfigurationError` if
    this machine has no such device.
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
