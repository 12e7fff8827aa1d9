"""The result of `rollstream profile` for an engine and its model, as a small file: the constants of
the roofline, the errors of the fit, and B_max.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import xxhash
from transformers import PreTrainedConfig

from rollstream.producers.engines.roofline import Roofline
from rollstream.errors import ConfigurationError

SHAPE_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Fields of a model's configuration on which its step time depends."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """`error` is the median relative error of the fit, `error_max` the largest, over `points` step
    times; `batch_max` is B_max for `slots`.
    """

    engine: str
    model: str
    device: str
    slots: int
    context_max: int
    roofline: Roofline
    batch_max: int
    error: float
    error_max: float
    points: int


def model_key(config: PreTrainedConfig) -> str:
    """A key that is equal for models of equal shape, whatever their weights."""
    fields = {name: getattr(config, name, None) for name in SHAPE_FIELDS}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def profile_path(folder: Path, engine: str, model: str) -> Path:
    """The file in which a run keeps the profile of an engine and a model."""
    return folder / "profiles" / f"{engine}-{model}.json"


def write_profile(path: Path, profile: EngineProfile) -> None:
    """Write a profile, replacing an earlier one atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_profile(path: str | Path) -> EngineProfile:
    """Read a profile. Raises `ConfigurationError` if the file holds none."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=EngineProfile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{path} is no profile ({error}); `rollstream profile CONFIG` writes one"
        ) from None
    if not (found.batch_max >= 1 and found.roofline.step_s(1, 0) > 0):
        raise ConfigurationError(f"{path} is no profile: a step of no time, or B_max below 1")
    return found
