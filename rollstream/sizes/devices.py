"""Lists accelerators by name with memory, peak arithmetic and bandwidths from NVIDIA's data sheets,
and reads `--gpus` (`parse_gpus`).

`link` is the speed between two cards of a machine in one direction: NVLink, else PCIe. `flops` is
dense bfloat16 with float32 sums; where a data sheet states it with sparsity, half of that. A card
known by its memory alone (`24GB`) has no speed, so a plan for it has no rates.
"""

import re
from dataclasses import dataclass

from rollstream.errors import ConfigurationError

GB = 1e9
"""A gigabyte as data sheets count it (SI)."""
PCIE = 25e9
"""Bytes/s of a transfer over PCIe 4.0 x16. A choice: four fifths of the 31.5e9 that 16 lanes of 16
GT/s have after their 128b/130b coding (PCI Express Base Specification 4.0).
"""
CARDS_PER_MACHINE = 8
"""A data centre's server has this many cards, as NVIDIA's HGX boards and DGX systems do."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Describes one kind of card: `memory` in bytes, `flops` in 1/s, the others in bytes/s; 0 means
    unknown.
    """

    name: str
    memory: float
    flops: float = 0.0
    bandwidth: float = 0.0
    link: float = PCIE


_CARDS = (
    Accelerator("B200", 180 * GB, 2250e12, 8.0e12, 900e9),
    Accelerator("H200", 141 * GB, 989e12, 4.8e12, 450e9),
    Accelerator("H800", 80 * GB, 989e12, 3.35e12, 200e9),
    Accelerator("H100", 80 * GB, 989e12, 3.35e12, 450e9),
    Accelerator("H100 NVL", 94 * GB, 835e12, 3.9e12, 300e9),
    Accelerator("H100 PCIe", 80 * GB, 756e12, 2.0e12),
    Accelerator("A800", 80 * GB, 312e12, 2.04e12, 200e9),
    Accelerator("A100", 80 * GB, 312e12, 2.04e12, 300e9),
    Accelerator("A100 40GB", 40 * GB, 312e12, 1.56e12, 300e9),
    Accelerator("H20", 96 * GB, 148e12, 4.0e12, 450e9),
    Accelerator("L40S", 48 * GB, 362e12, 0.864e12),
    Accelerator("RTX A6000", 48 * GB, 155e12, 0.768e12),
    Accelerator("L4", 24 * GB, 121e12, 0.3e12),
    Accelerator("A10", 24 * GB, 125e12, 0.6e12),
    Accelerator("RTX 4090", 24 * GB, 165e12, 1.008e12),
    Accelerator("RTX 3090", 24 * GB, 71e12, 0.936e12),
)
ACCELERATORS = {card.name: card for card in _CARDS}


def accelerator_named(name: str) -> Accelerator | None:
    """Returns the card with this name, as CUDA gives it; None if it is not in the table. The
    longest match counts: an `H100 PCIe` is no `H100`, an `H200` no `H20`.
    """
    words = f" {name.replace('-', ' ').lower()} "
    found = [card for card in ACCELERATORS if f" {card.lower()} " in words]
    return ACCELERATORS[max(found, key=len)] if found else None


def parse_gpus(text: str) -> tuple[int, Accelerator]:
    """Returns the number and kind of cards in `8xH100`, `H100` or `2x24GB`. Raises
    `ConfigurationError` for an unknown card and for none.
    """
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", text.strip(), re.IGNORECASE)
    assert match is not None, "the second group takes any text"
    count, kind = int(match[1] or 1), match[2].strip()
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", kind, re.IGNORECASE)
    card = Accelerator(kind, float(size[1]) * GB) if size else accelerator_named(kind)
    if card is None or not count:
        raise ConfigurationError(
            f"--gpus {text}: write a number and a card, as 8xH100 or 2x24GB; known cards: "
            f"{', '.join(ACCELERATORS)}"
        )
    return count, card
