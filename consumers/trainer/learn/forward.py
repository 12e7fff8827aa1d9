"""Tests before training, on a dozen tokens, whether a model can be trained and packed.

transformers 5 separates packed sequences where positions restart at 0 (masking_utils.py,
`find_packed_sequence_indices`, given no mask and no cache), but only in models that pass their
positions to it: OPT does not, ALiBi has none, state-space models carry their state across. No
configuration field shows this reliably; the hidden states do.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.trainer.learn.scores import Float32Head, body_of
from rollstream.errors import ConfigurationError

FIRST, SECOND = 5, 7
"""Lengths in tokens of the two test sequences."""
TOLERANCE = 1e-3
"""Rounding in float32 is far below it; one attended token of another sequence is far above it."""


def check_trainable(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` unless `model` is causal and its logits equal those of
    `Float32Head`, which every score depends on. `model` is float32 and not sharded.
    """
    body, tokens = body_of(model), _tokens(model)
    with _trial(model):
        whole = _hidden(body, tokens)
        start = _hidden(body, tokens[:, :FIRST])
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        ours = Float32Head(model)(whole[0])
    if _differ(whole[:, :FIRST], start):
        raise _refusal(model, "a token's state depends on the tokens after it: it is not causal")
    if _differ(logits, ours):
        raise _refusal(model, "its logits are not its head's product with the body's last states")


def can_pack(model: PreTrainedModel) -> bool:
    """Whether sequences that share a row of `model`'s forward do not attend to each other when
    their positions restart at 0. `model` is float32 and not sharded.
    """
    body, tokens = body_of(model), _tokens(model)
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(tokens.device)
    with _trial(model):
        alone = _hidden(body, tokens[:, FIRST:])
        try:
            packed = _hidden(body, tokens, positions)
        except TypeError:  # a forward without positions
            return False
    return not _differ(packed[:, FIRST:], alone)


def _tokens(model: PreTrainedModel) -> Tensor:
    embeddings: Any = model.get_input_embeddings()
    return (torch.arange(FIRST + SECOND) % embeddings.weight.shape[0])[None].to(model.device)


def _hidden(body: Callable[..., Any], tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    given = {} if positions is None else {"position_ids": positions}
    return body(input_ids=tokens, use_cache=False, **given)[0]


@contextmanager
def _trial(model: PreTrainedModel) -> Generator[None]:
    """Run the block without gradients and dropout."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)


def _differ(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).norm()) > TOLERANCE * float(expected.norm())


def _refusal(model: PreTrainedModel, why: str) -> ConfigurationError:
    return ConfigurationError(f"model: {type(model).__name__} cannot be trained: {why}")
