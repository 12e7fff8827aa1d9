"""The device on which the trainer computes (setting `trainer.device`)."""

import torch

from rollstream.errors import ConfigurationError


def device_of(name: str) -> torch.device:
    """The device named `cpu`, `cuda`, `cuda:N` or `auto` (CUDA if there is a device, else the CPU).
    Raises `ConfigurationError` if this machine has no such device.
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
