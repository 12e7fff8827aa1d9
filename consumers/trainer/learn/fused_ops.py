"""Norm, SwiGLU, rotary positions and attention of a decoder layer with hand-written backward
passes, for N rows (tokens) and H heads of size D. Around matrix products, half of a small model's
step, autograd keeps and re-reads three to five tensors for each operation, where one or two
suffice.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
# pyright: reportIncompatibleMethodOverride=false, reportUntypedBaseClass=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return mean_square.add_(eps).rsqrt_()


def _rms_backward(grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    # d/dx of x / rms(x): (g − n·mean(g·n)) / rms.
    along = torch.linalg.vecdot(grad, normed).unsqueeze(-1).div_(normed.shape[-1])
    return torch.addcmul(grad, normed, along, value=-1).mul_(inverse)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        normed, inverse = ctx.saved_tensors
        return _rms_backward(grad, normed, inverse), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        ctx.save_for_backward(gate_up, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, silu = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        gate_grad, up_grad = out.chunk(2, dim=-1)
        torch.mul(grad, silu, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotations: Tensor) -> Tensor:
        ctx.save_for_backward(rotations)
        return _rotated(x, rotations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rotations,) = ctx.saved_tensors
        return _rotated(grad, rotations.conj()), None


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    # Elements 2i and 2i + 1 of a head form one complex number, and one product rotates it.
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2)


@dataclass(frozen=True, slots=True)
class SequenceBlock:
    """`sequences` of them from row `start` on, each padded at its end to `length` rows."""

    start: int
    sequences: int
    length: int

    def view(self, rows: Tensor) -> Tensor:
        """A view [sequences, heads, length, D] of `rows` [N, heads, D]."""
        end = self.start + self.sequences * self.length
        return rows[self.start : end].unflatten(0, (self.sequences, self.length)).transpose(1, 2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_key: Tensor, value: Tensor, heads: int, blocks: Sequence[SequenceBlock]
    ) -> Tensor:
        out = torch.empty_like(query_key[:, :heads])
        block_tensors: list[tuple[Tensor, ...]] = []
        for block in blocks:
            parts = query_key[:, :heads], query_key[:, heads:], value
            leaves = tuple(block.view(part).detach().requires_grad_() for part in parts)
            with torch.enable_grad():
                query, keys, values = leaves
                attended = F.scaled_dot_product_attention(
                    query, keys, values, is_causal=True, enable_gqa=heads != value.shape[1]
                )
            block.view(out).copy_(attended.detach())
            block_tensors.append((attended, *leaves))
        ctx.kept, ctx.blocks, ctx.heads = block_tensors, blocks, heads
        ctx.shapes = query_key, value
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query_key, value = (torch.empty_like(like) for like in ctx.shapes)
        for block, (attended, *leaves) in zip(ctx.blocks, ctx.kept, strict=True):
            parts = query_key[:, : ctx.heads], query_key[:, ctx.heads :], value
            grads = torch.autograd.grad(attended, leaves, block.view(grad))
            for part, part_grad in zip(parts, grads, strict=True):
                # Autograd would make a zero-filled tensor of all rows for each block and add them.
                block.view(part).copy_(part_grad)
        return query_key, value, None, None


def normalise(x: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) over the last dimension, without the norm's gain."""
    return _Normalise.apply(x, eps)  # pyright: ignore[reportReturnType]


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) · up [N, f]; `gate_up` [N, 2 f] holds gate, then up."""
    return _SwiGlu.apply(gate_up)  # pyright: ignore[reportReturnType]


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """`x` [N, H, D] by `rotations` [N, H, D/2] (complex). Elements 2i and 2i + 1 of a head are a
    pair; in transformers i and i + D/2 are.
    """
    return _Rotate.apply(x, rotations)  # pyright: ignore[reportReturnType]


class _Recompute(torch.autograd.Function):
    """Keeps only the part's input. torch's own `checkpoint` does not fit: its reentrant form adds
    to `.grad` instead of returning gradients, and its other form runs the part twice for `_Attend`,
    whose backward pass has a backward pass of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.part, ctx.parameters = part, parameters
        ctx.save_for_backward(x)
        return part(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            x = saved.detach().requires_grad_(ctx.needs_input_grad[1])
            out = ctx.part(x)
        inputs = [x, *ctx.parameters]
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = iter(torch.autograd.grad(out, differentiable, grad))
        return None, *(next(gradients) if tensor.requires_grad else None for tensor in inputs)


def recompute(part: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`part(x)`, keeping only `x` for the backward pass (Chen et al., arXiv 1604.06174), with the
    same bits. `parameters` must be all that the part reads.
    """
    return _Recompute.apply(part, x, *parameters)  # pyright: ignore[reportReturnType]


def attend(query_key: Tensor, value: Tensor, heads: int, blocks: Sequence[SequenceBlock]) -> Tensor:
    """Returns causal attention within each sequence of `blocks`, which cover each row once.
    `query_key` [N, heads + kv heads, D] holds queries, then keys; `value` is [N, kv heads, D], the
    result [N, heads, D].
    """
    return _Attend.apply(query_key, value, heads, blocks)  # pyright: ignore[reportReturnType]
