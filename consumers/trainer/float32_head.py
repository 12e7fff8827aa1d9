"""The head of a causal decoder in float32, whatever its body computes in.

The product of head and hidden states and the softmax after it decide a token's log-probability, and
bfloat16's eight bits there are the largest part of what trainer and engine disagree about: the code
of PipelineRL (Piché et al., arXiv 2509.19128) computes it in float32 on both sides. What an
architecture does around that product (soft caps, scales) is its own code: the class's forward runs
over hidden states that are given instead of a body.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from streams.errors import ConfigurationError


class Float32Head:
    """Hidden states as the body gives them → logits, float32. For one forward pass in one thread:
    it takes the head's parameters as they are now, once for all slices, so that their gradients are
    summed in float32 too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        name, head = _head_of(model)
        bias: Tensor | None = getattr(head, "bias", None)  # typed as if there always were one
        self.size = head.weight.shape[0]
        self._body = _Given(body_of(model))
        # The class without its constructor (it would build a model), without hooks and wrappers.
        self._shell: Any = object.__new__(type(model))
        modules = {
            **model._modules,
            model.base_model_prefix: self._body,
            name: _Product(head.weight.float(), None if bias is None else bias.float()),
        }
        self._shell.__dict__.update(model.__dict__, _modules=modules)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[G, V] logits of `hidden` [G, d]."""
        self._body.hidden = hidden.float()[None]
        output = type(self._shell).forward(self._shell, inputs_embeds=self._body.hidden)
        return output[0][0]


def body_of(model: PreTrainedModel) -> nn.Module:
    """What makes hidden states of tokens."""
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(body, nn.Module):
        raise _foreign(model, f"it has no body {model.base_model_prefix!r} under its head")
    return body


def _head_of(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    head = model.get_output_embeddings()
    for name, module in model.named_children():
        if module is head and isinstance(module, nn.Linear):
            return name, module
    raise _foreign(model, "its head is no linear layer of its own")


def _foreign(model: PreTrainedModel, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"model: {type(model).__name__} cannot be trained: {why}; the trainer takes decoders that "
        "end in one (Llama, Qwen, Mistral, Gemma, GPT-NeoX and most others of transformers)"
    )


class _Product:
    """Stands in the head's place."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class _Given:
    """Stands in the body's place, and in that of every part of it: called, it gives `hidden`. Other
    attributes are the body's.
    """

    hidden: Tensor

    def __init__(self, body: nn.Module) -> None:
        self._own = body

    def __call__(self, *_: object, **__: object) -> "_Output":
        return _Output(self.hidden)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        return self if isinstance(found, nn.Module) else found


class _Output:
    """Hidden states, and nothing of what else a body may return (caches, attentions, routing)."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]
