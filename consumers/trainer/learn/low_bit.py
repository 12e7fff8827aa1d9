"""AdamW whose moments have 8 bits, by bitsandbytes (Dettmers et al., "8-bit optimizers via
block-wise quantization", arXiv 2110.02861): a byte indexes one of 256 unevenly spaced values, and
256 numbers share a float32 scale. Tensors of fewer than 4096 numbers keep float32.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import ConfigurationError


def eight_bit_adamw(parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> Any:
    """Raises `ConfigurationError` without bitsandbytes (the extra `lowbit`)."""
    try:
        library: Any = import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigurationError(
            f'trainer.optimiser = "adamw_8bit" needs bitsandbytes ({error}): '
            "pip install 'rollstream[lowbit]'"
        ) from error
    adam: Any = library.optim.AdamW8bit(
        list(parameters.values()),
        lr=settings.lr,
        betas=settings.betas,
        eps=1e-8,
        weight_decay=settings.weight_decay,
    )
    for index, parameter in enumerate(parameters.values()):
        # Made now, so that a checkpoint can be restored before the first update.
        adam.init_state(adam.param_groups[0], parameter, 0, index)
    return adam


def named_moments(adam: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The moments themselves, not copies: of a small parameter under AdamW's names, of another one
    the codes (uint8) and the scales of their blocks (float32).
    """
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state: Mapping[str, Any] = adam.state[parameter]
        for kind, number in (("mean", 1), ("square", 2)):
            if "qmap1" in state:
                moments[f"{kind}_codes.{name}"] = state[f"state{number}"]
                moments[f"{kind}_scales.{name}"] = state[f"absmax{number}"]
            else:
                moments[f"{kind}.{name}"] = state[f"state{number}"]
    return moments


def set_steps(adam: Any, parameters: Sequence[nn.Parameter], applied: int) -> None:
    """The number of updates that the bias correction counts."""
    for parameter in parameters:
        adam.state[parameter]["step"] = applied
