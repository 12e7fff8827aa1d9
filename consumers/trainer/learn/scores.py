"""Log-probability and entropy of given tokens, at the temperature of their sampling, from a model's
hidden states, in slices that bound the memory.

Head product and softmax are float32, as in PipelineRL's code (Piché et al., arXiv 2509.19128): in
bfloat16 they would cause most of the difference between trainer and engine.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollstream.errors import ConfigurationError


class Float32Head:
    """Logits from the hidden states of the body (the model without its head), for one forward pass
    in one thread. Soft caps and scales around the head's product are kept: the class's forward runs
    with a body that returns the given hidden states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        name, head = _head_of(model)
        bias: Tensor | None = getattr(head, "bias", None)  # torch types it as never None
        self.size = head.weight.shape[0]
        self._body = _GivenHidden(body_of(model))
        # An instance without its constructor (which would build a model), hooks and wrappers.
        self._shell: Any = object.__new__(type(model))
        # The parameters are cast once for all slices, so that their gradients are summed in float32
        # too.
        modules = {
            **model._modules,
            model.base_model_prefix: self._body,
            name: _HeadProduct(head.weight.float(), None if bias is None else bias.float()),
        }
        self._shell.__dict__.update(model.__dict__, _modules=modules)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits [G, V] of `hidden` [G, d]."""
        self._body.hidden = hidden.float()[None]
        output = type(self._shell).forward(self._shell, inputs_embeds=self._body.hidden)
        return output[0][0]


def body_of(model: PreTrainedModel) -> nn.Module:
    """The module that turns tokens into hidden states; raises `ConfigurationError` without one."""
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(body, nn.Module):
        raise _unsupported(model, f"it has no body {model.base_model_prefix!r} under its head")
    return body


def _head_of(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    head = model.get_output_embeddings()
    for name, module in model.named_children():
        if module is head and isinstance(module, nn.Linear):
            return name, module
    raise _unsupported(model, "its head is no linear layer of its own")


def _unsupported(model: PreTrainedModel, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"model: {type(model).__name__} cannot be trained: {why}; the trainer takes decoders that "
        "end in one (Llama, Qwen, Mistral, Gemma, GPT-NeoX and most others of transformers)"
    )


class _HeadProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class _GivenHidden:
    """Stands in place of the body and its submodules: a call returns `hidden`."""

    hidden: Tensor

    def __init__(self, body: nn.Module) -> None:
        self._own = body

    def __call__(self, *_: object, **__: object) -> "_BodyOutput":
        return _BodyOutput(self.hidden)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._own, name)
        return self if isinstance(attribute, nn.Module) else attribute


class _BodyOutput:
    """An output with hidden states only: other attributes (caches, attentions, routing)
    are None.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


LOGITS_MAX = 1 << 24
"""In memory at once: 64 MiB as float32. More are computed in slices, and again in the backward
pass: 4 096 tokens over a vocabulary of 150 000 would hold 2.4 GB three times over.
"""


class TokenScores(NamedTuple):
    """The token scores of G tokens, differentiable: log-probabilities [G], entropies [G], in nats,
    of the distributions that they were sampled from, and, where the objective reads them, `states`
    [G, d] that predict them.
    """

    logprobs: Tensor
    entropy: Tensor
    states: Tensor | None = None


class AllowedTokens(NamedTuple):
    """The sets that G tokens were chosen from: `bits` [C, W] (uint8, the lowest bit first) and the
    `row` [G] there of each token's set, -1 for the whole vocabulary.
    """

    bits: Tensor
    row: Tensor

    def without_others(self, logits: Tensor) -> Tensor:
        """Returns logits [G, V] in which tokens outside of the sets have no probability."""
        byte_bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = self.bits.index_select(0, self.row.clamp(min=0))
        allowed = ((bits[:, :, None] >> byte_bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
        allowed = F.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
        return logits.masked_fill(~(allowed | (self.row < 0)[:, None]), NEVER)


NEVER = -1e30
"""Finite, since an entropy would be 0 · ∞; e to the power of it is 0 at every temperature."""


def allowed_of(bits: Tensor | None, row: Tensor | None) -> AllowedTokens | None:
    return None if bits is None or row is None else AllowedTokens(bits, row)


class _ScoreFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
        probabilities = logprobs.exp()
        entropy = torch.linalg.vecdot(probabilities, logprobs).neg_()
        # Of the [G, V] values only the probabilities are kept.
        ctx.save_for_backward(probabilities, entropy, targets, temperature)
        ctx.set_materialize_grads(False)  # None for what no loss uses
        return logprobs.gather(1, targets[:, None]).squeeze(1), entropy

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        # d log p(target) / d logit = (1[target] − p) / T; dH / d logit = −p (log p + H) / T.
        probabilities, entropy, targets, temperature = ctx.saved_tensors
        logits_grad: Tensor | None = None
        if grad is not None:
            scaled = (grad / temperature)[:, None]
            logits_grad = (probabilities * -scaled).scatter_add_(1, targets[:, None], scaled)
        if entropy_grad is not None:
            scaled = (entropy_grad / temperature)[:, None]
            logprobs = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
            of_entropy = probabilities * (logprobs + entropy[:, None]) * -scaled
            logits_grad = of_entropy if logits_grad is None else logits_grad.add_(of_entropy)
        return logits_grad, None, None


def score(
    logits: Tensor, targets: Tensor, temperature: Tensor, allowed: AllowedTokens | None = None
) -> TokenScores:
    """Returns the scores of `targets` [G] under `logits` [G, V] divided by `temperature` [G], in
    float32, each in the distribution over its `allowed` tokens.
    """
    logits = logits.float()
    if allowed is not None:
        logits = allowed.without_others(logits)
    return TokenScores(*_ScoreFunction.apply(logits, targets, temperature))  # pyright: ignore


def score_hidden(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: Tensor,
    allowed: AllowedTokens | None = None,
) -> TokenScores:
    """Scores where the logits are `hidden` [G, d] times `head` [V, d] transposed."""
    return score_through(
        lambda some: F.linear(some, head), head.shape[0], hidden, targets, temperature, allowed
    )


def score_through(
    logits_of: Callable[[Tensor], Tensor],
    vocabulary: int,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    allowed: AllowedTokens | None = None,
) -> TokenScores:
    """`logits_of` maps slices [g, d] of `hidden` to [g, vocabulary], at most `LOGITS_MAX` logits at
    a time.
    """
    rows = max(1, LOGITS_MAX // vocabulary)
    if len(targets) <= rows:
        return score(logits_of(hidden), targets, temperature, allowed)

    def score_slice(
        hidden: Tensor, targets: Tensor, temperature: Tensor, row: Tensor | None
    ) -> TokenScores:
        mine = None if allowed is None or row is None else allowed._replace(row=row)
        return score(logits_of(hidden), targets, temperature, mine)

    of_tokens = hidden.split(rows), targets.split(rows), temperature.split(rows)
    sets = [None] * len(of_tokens[0]) if allowed is None else allowed.row.split(rows)
    parts: list[TokenScores] = [
        checkpoint(score_slice, h, t, c, r, use_reentrant=False, preserve_rng_state=False)
        for h, t, c, r in zip(*of_tokens, sets, strict=True)
    ]  # pyright: ignore[reportAssignmentType]
    return TokenScores(
        torch.cat([p.logprobs for p in parts]), torch.cat([p.entropy for p in parts])
    )
