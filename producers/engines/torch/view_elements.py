"""Reads, writes and compares elements in the served memory (`WeightView`): the checkpoint's
elements times the view's scale and their column's factor. Positions are the checkpoint's.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rollstream.producers.engines.torch.weights import WeightView, bits_of_elements

BLOCK_ELEMENTS = 1 << 19  # 2 MiB in fp32


def is_exact(view: WeightView, dtype: torch.dtype, norms: Mapping[str, Tensor]) -> bool:
    """Returns whether the view gives the elements bit for bit; `norms` has the tensor of its
    factor.
    """
    short = dtype in (torch.bfloat16, torch.float16)
    if view.scale is None and view.norm is None:
        return view.view.dtype == dtype or (short and view.view.dtype == torch.float32)
    factor = view.factor(norms)
    usable = factor is None or bool((factor.isfinite() & (factor != 0)).all())
    # A 16-bit element times a factor keeps 24 bits in fp32, so the quotient rounds to the same
    # element, unless the factor is 0 or not finite.
    return short and view.view.dtype == torch.float32 and usable


def is_finite(values: Tensor) -> bool:
    if not values.is_floating_point():
        return True
    begins = range(0, len(values), BLOCK_ELEMENTS)
    return all(bool(values[at : at + BLOCK_ELEMENTS].isfinite().all()) for at in begins)


def _blocks(view: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    # In row-major order: whole rows, or parts of one.
    if view.ndim <= 1:
        yield view.reshape(-1)[begin:end]
        return
    size = view[0].numel()
    first, last = begin // size, end // size
    if begin % size:
        yield from _blocks(view[first], begin % size, min(end - first * size, size))
        first += 1
    if first < last:
        yield view[first:last]
    if end % size and first <= last:
        yield from _blocks(view[last], 0, end % size)


def _placed(
    view: WeightView, begin: int, count: int, factor: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    # In small blocks, because the arithmetic makes fp32 copies of them.
    at = 0
    while at < count:
        end = min(count, at + BLOCK_ELEMENTS)
        for block in _blocks(view.view, begin + at, begin + end):
            columns = factor
            if factor is not None and block.ndim == 1:
                column = (begin + at) % len(factor)
                columns = factor[column : column + len(block)]
            yield slice(at, at + block.numel()), block, columns
            at += block.numel()


def read_elements(
    view: WeightView, begin: int, end: int, dtype: torch.dtype, factor: Tensor | None
) -> Tensor:
    """Returns the checkpoint's elements `[begin, end)`, contiguous; bit for bit if `is_exact`."""
    elements = torch.empty(end - begin, dtype=dtype, device=view.view.device)
    for span, block, columns in _placed(view, begin, end - begin, factor):
        exact = block
        if columns is not None:
            exact = exact / columns
        if view.scale is not None:
            exact = exact / view.scale
        elements[span].view(block.shape).copy_(exact)
    return elements


def write_elements(view: WeightView, begin: int, values: Tensor, factor: Tensor | None) -> None:
    for span, block, columns in _placed(view, begin, len(values), factor):
        block.copy_(view.served(values[span].view(block.shape), columns))


def serves_elements(view: WeightView, begin: int, values: Tensor, factor: Tensor | None) -> bool:
    return all(
        torch.equal(
            bits_of_elements(block),
            bits_of_elements(view.served(values[span].view(block.shape), columns)),
        )
        for span, block, columns in _placed(view, begin, len(values), factor)
    )
