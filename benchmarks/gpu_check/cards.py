"""Peak speed of cards: dense bfloat16 with float32 sums, in FLOP/s, by the name that CUDA gives.
From NVIDIA's data sheets; where they state it with sparsity, half of that.
"""

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H800": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "A800": 312e12,
    "A100": 312e12,
    "H20": 148e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}


def peak_of(name: str) -> float | None:
    """Returns the peak of the card with this name, None if it is not in the table. The longest
    match counts: an `H100 PCIe` is no `H100`, an `H200` no `H20`.
    """
    words = f" {name.replace('-', ' ')} "
    found = [card for card in PEAKS if f" {card} " in words]
    return PEAKS[max(found, key=len)] if found else None
