"""Accelerators by NVIDIA's data sheets, and the option `--gpus`. A card given by its memory alone
(`24GB`) has no known speed.
"""

import re
from dataclasses import dataclass

from rollstream.errors import ConfigurationError

GB = 1e9
"""A gigabyte of data sheets (SI)."""
PCIE = 25e9
"""Bytes/s of a transfer over PCIe 4.0 x16. Assumed: four fifths of the 31.5e9 that 16 lanes of 16
GT/s have after their 128b/130b coding (PCI Express Base Specification 4.0).
"""
CARDS_PER_MACHINE = 8
"""As in NVIDIA's HGX boards and DGX systems."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """0 means unknown. `memory` is in bytes, `bandwidth`, that of its memory, in bytes/s. `flops`
    are operations/s in dense bfloat16 with float32 sums; half of a figure with sparsity. `link` is
    the bytes/s between two cards of a machine in one direction: NVLink, else PCIe.
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


_ANY_CARD = re.compile(
    r"nvidia|tesla|geforce|gpus?|sxm[0-9]?|pcie|hbm[0-9]e?|graphics|tensor|core|card"
)
"""Words of a card's name that make it no other card."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?gb", re.IGNORECASE)


def accelerator_named(name: str) -> Accelerator | None:
    """The listed card whose words are in `name`, which may be that of CUDA (`NVIDIA
    A100-SXM4-40GB`, an `A100 40GB`). The longest match counts.
    """
    joined = _SIZE.sub(r"\1gb", re.sub(r"[-_]", " ", name.lower()))
    words = joined.split(" ")
    matches = [card for card in _CARDS if set(card.name.lower().split()) <= set(words)]
    card = max(matches, key=lambda card: len(card.name.split()), default=None)
    if card is None:
        return None
    of_card = {*card.name.lower().split(), f"{card.memory / GB:g}gb", ""}
    # Another size of memory, or other words (`Laptop`), make it another card.
    others = [word for word in words if word not in of_card and not _ANY_CARD.fullmatch(word)]
    return None if others else card


_COUNTED = [
    re.compile(form, re.IGNORECASE | re.DOTALL)
    for form in (
        r"(?P<count>[0-9]{1,9})\s*x\s*(?P<kind>.*)",
        r"(?P<count>[0-9]{1,9})\s+(?!GB)(?P<kind>.*)",
        r"(?P<kind>.*?)\s+x\s*(?P<count>[0-9]{1,9})",
    )
]
"""`8xH100`, `8 H100`, `H100 x8`."""


def parse_gpus(text: str) -> tuple[int, Accelerator]:
    """`8xH100`, `8 H100`, `H100 x8`, `H100` or `2x24GB`. Raises `ConfigurationError` for an unknown
    card or 0 cards.
    """
    kind, count = text.strip(), 1
    for form in _COUNTED:
        if match := form.fullmatch(kind):
            kind, count = match["kind"], int(match["count"])
            break
    size = _SIZE.fullmatch(kind)
    card = Accelerator(kind, float(size[1]) * GB) if size else accelerator_named(kind)
    if card is None or not count:
        raise ConfigurationError(
            f"--gpus {text}: write a number and a card, as 8xH100 or 2x24GB; known cards: "
            f"{', '.join(ACCELERATORS)}"
        )
    return count, card


@dataclass(frozen=True, slots=True)
class CardKind:
    """`price` of one card for an hour in any currency; 0: unknown."""

    card: Accelerator
    cards: int
    price: float = 0.0


def parse_kinds(text: str) -> tuple[CardKind, ...]:
    """`8xH100@2.5,16xL40S@0.8`: as in `parse_gpus`, each with its price for an hour if known.
    Raises `ConfigurationError` for a wrong part or a repeated card.
    """
    kinds: list[CardKind] = []
    for part in text.split(","):
        gpus, at, price = part.partition("@")
        cards, card = parse_gpus(gpus)
        if at and not re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", price):
            raise ConfigurationError(
                f"--gpus {part}: write the price of one card for an hour after the @, as 8xH100@2.5"
            )
        kinds.append(CardKind(card, cards, float(price or 0)))
    names = [kind.card.name for kind in kinds]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"--gpus {text}: name each card once, with the number of all")
    return tuple(kinds)
