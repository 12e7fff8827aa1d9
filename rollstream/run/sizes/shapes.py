"""Sizes of a decoder model, from its `config.json` or a table of well-known models. Counts of
parameters are exact for the families in `DENSE` and `EXPERTS`; others are refused, because a wrong
count would be worse than none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.hf_folder import (
    CONFIG,
    find_hf_folder,
    longest_positions,
    missing_checkpoint,
    read_hf_config,
)

# Tests compare the counts with the totals that the models' authors publish.
DENSE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen3_moe")
"""Values of `model_type` whose parameters are counted."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A mixture of experts: each layer has `count` experts with `intermediate` inner numbers each;
    each token uses `used` of them.
    """

    count: int
    used: int
    intermediate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`family` is its `model_type`; `hidden`, `intermediate` and `width` are the sizes of the
    residual stream, of the feed-forward part and of one attention head; `positions` is the longest
    sequence. With `tied` embedding and output matrix are one. `hub` is the Hugging Face name of a
    model from the table, else "".
    """

    name: str
    hub: str = ""
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int
    positions: int
    tied: bool = False
    experts: ExpertSizes | None = None

    @property
    def query_size(self) -> int:
        """Returns numbers of one token's queries in one layer."""
        return self.heads * self.width

    @property
    def kv_size(self) -> int:
        """Returns numbers of one token's keys in one layer; its values have as many."""
        return self.kv_heads * self.width

    @property
    def has_head_norms(self) -> bool:
        return self.family.startswith("qwen3")

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """Returns (inputs, outputs) of each matrix of one layer, of every expert: queries, keys,
        values and attention's output, then gate, up and down.
        """
        d, f = self.hidden, self.intermediate
        attention = (
            (d, self.query_size), (d, self.kv_size), (d, self.kv_size), (self.query_size, d),
        )  # fmt: skip
        count = 1
        if self.experts is not None:
            f, count = self.experts.intermediate, self.experts.count
        return attention + ((d, f), (d, f), (f, d)) * count

    @property
    def tensors(self) -> tuple[tuple[int, int, int], ...]:
        """Returns the shapes of all trained tensors: (number of such tensors, rows, numbers in a
        row).
        """
        attention, others = self.linear_layers[:4], self.linear_layers[4:]
        matrices = [(rows, columns) for columns, rows in attention]
        if self.experts is None:
            matrices += [(rows, columns) for columns, rows in others]
        else:
            count, size = self.experts.count, self.hidden * self.experts.intermediate
            # As in transformers, experts are two tensors with one row for each expert, the router
            # is a third.
            matrices += [(count, 2 * size), (count, size), (count, self.hidden)]
        small_parameters = self.layer_parameters - sum(rows * size for rows, size in matrices)
        # Norms and biases are small: one tensor of one row.
        layer_tensors = [
            (self.layers, rows, size) for rows, size in (*matrices, (1, small_parameters))
        ]
        roots = (1 if self.tied else 2, self.vocabulary, self.hidden)
        return (*layer_tensors, roots, (1, 1, self.hidden))

    @property
    def layer_parameters(self) -> int:
        """Returns the layer parameters of one layer: matrices, norms, biases, router."""
        small = 2 * self.hidden
        if self.family == "qwen2":
            small += self.query_size + 2 * self.kv_size
        if self.has_head_norms:
            small += 2 * self.width
        if self.experts is not None:
            small += self.hidden * self.experts.count
        return small + sum(rows * columns for rows, columns in self.linear_layers)

    @property
    def embedding_parameters(self) -> int:
        """The output matrix has as many."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Counts the parameters outside of the layers."""
        return self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def active_parameters(self) -> int:
        """Counts the parameters that one token uses."""
        if self.experts is None:
            return self.parameters
        e = self.experts
        unused = (e.count - e.used) * 3 * self.hidden * e.intermediate
        return self.parameters - self.layers * unused

    @property
    def kv_numbers(self) -> int:
        """Returns the numbers of one token, over all layers."""
        return 2 * self.layers * self.kv_size

    @property
    def feed_forward(self) -> int:
        """Returns inner numbers of one token in one layer, over the experts that it uses."""
        return self.intermediate if self.experts is None else self._active_feed_forward

    @property
    def _active_feed_forward(self) -> int:
        assert self.experts is not None
        return self.experts.used * self.experts.intermediate

    def adapter_parameters(self, rank: int) -> int:
        """Returns the adapter parameters of this rank on all `linear_layers` (Hu et al., "LoRA",
        arXiv 2106.09685).
        """
        return rank * self.layers * sum(rows + columns for rows, columns in self.linear_layers)


def _name_of(hub: str) -> str:
    return hub.rpartition("/")[2].lower().removesuffix("-v0.1")


def _qwen2(hub: str, sizes: tuple[int, ...], tied: bool, positions: int = 32_768) -> ModelShape:
    layers, hidden, intermediate, heads, kv_heads, vocabulary = sizes
    return ModelShape(
        hub=hub, name=_name_of(hub), family="qwen2", layers=layers, hidden=hidden,
        intermediate=intermediate, heads=heads, kv_heads=kv_heads,
        width=hidden // heads, vocabulary=vocabulary, positions=positions, tied=tied,
    )  # fmt: skip


def _qwen3(hub: str, sizes: tuple[int, ...], tied: bool) -> ModelShape:
    layers, hidden, intermediate, heads, kv_heads = sizes
    return ModelShape(
        hub=hub, name=_name_of(hub), family="qwen3", layers=layers, hidden=hidden,
        intermediate=intermediate, heads=heads, kv_heads=kv_heads,
        width=128, vocabulary=151_936, positions=40_960, tied=tied,
    )  # fmt: skip


def _llama(hub: str, sizes: tuple[int, ...], width: int = 128, tied: bool = False) -> ModelShape:
    layers, hidden, intermediate, heads, kv_heads = sizes
    return ModelShape(
        hub=hub, name=_name_of(hub), family="llama", layers=layers, hidden=hidden,
        intermediate=intermediate, heads=heads, kv_heads=kv_heads,
        width=width, vocabulary=128_256, positions=131_072, tied=tied,
    )  # fmt: skip


def _with_experts(
    hub: str, family: str, base: ModelShape, experts: ExpertSizes, vocabulary: int
) -> ModelShape:
    return replace(
        base,
        hub=hub,
        name=_name_of(hub),
        family=family,
        experts=experts,
        vocabulary=vocabulary,
    )


_TABLE = (
    _qwen2("Qwen/Qwen2.5-0.5B", (24, 896, 4_864, 14, 2, 151_936), True),
    _qwen2("Qwen/Qwen2.5-1.5B", (28, 1_536, 8_960, 12, 2, 151_936), True),
    _qwen2("Qwen/Qwen2.5-3B", (36, 2_048, 11_008, 16, 2, 151_936), True),
    _qwen2("Qwen/Qwen2.5-7B", (28, 3_584, 18_944, 28, 4, 152_064), False, 131_072),
    _qwen2("Qwen/Qwen2.5-14B", (48, 5_120, 13_824, 40, 8, 152_064), False, 131_072),
    _qwen2("Qwen/Qwen2.5-32B", (64, 5_120, 27_648, 40, 8, 152_064), False, 131_072),
    _qwen2("Qwen/Qwen2.5-72B", (80, 8_192, 29_568, 64, 8, 152_064), False, 131_072),
    _qwen3("Qwen/Qwen3-0.6B", (28, 1_024, 3_072, 16, 8), True),
    _qwen3("Qwen/Qwen3-1.7B", (28, 2_048, 6_144, 16, 8), True),
    _qwen3("Qwen/Qwen3-4B", (36, 2_560, 9_728, 32, 8), True),
    _qwen3("Qwen/Qwen3-8B", (36, 4_096, 12_288, 32, 8), False),
    _qwen3("Qwen/Qwen3-14B", (40, 5_120, 17_408, 40, 8), False),
    _qwen3("Qwen/Qwen3-32B", (64, 5_120, 25_600, 64, 8), False),
    _llama("meta-llama/Llama-3.2-1B", (16, 2_048, 8_192, 32, 8), 64, True),
    _llama("meta-llama/Llama-3.2-3B", (28, 3_072, 8_192, 24, 8), 128, True),
    _llama("meta-llama/Llama-3.1-8B", (32, 4_096, 14_336, 32, 8)),
    _llama("meta-llama/Llama-3.1-70B", (80, 8_192, 28_672, 64, 8)),
    _llama("meta-llama/Llama-3.1-405B", (126, 16_384, 53_248, 128, 8)),
    _with_experts(
        "mistralai/Mixtral-8x7B-v0.1", "mixtral", _llama("", (32, 4_096, 14_336, 32, 8)),
        ExpertSizes(8, 2, 14_336), 32_000,
    ),
    _with_experts(
        "mistralai/Mixtral-8x22B-v0.1", "mixtral", _llama("", (56, 6_144, 16_384, 48, 8)),
        ExpertSizes(8, 2, 16_384), 32_000,
    ),
    _with_experts(
        "Qwen/Qwen3-30B-A3B", "qwen3_moe", _qwen3("", (48, 2_048, 6_144, 32, 4), False),
        ExpertSizes(128, 8, 768), 151_936,
    ),
    _with_experts(
        "Qwen/Qwen3-235B-A22B", "qwen3_moe", _qwen3("", (94, 4_096, 12_288, 64, 4), False),
        ExpertSizes(128, 8, 1_536), 151_936,
    ),
)  # fmt: skip
SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in _TABLE}
"""By lower-case name, by their published `config.json`."""


def find_shape(model: str) -> ModelShape:
    """Finds the shape by a checkpoint folder, the name of a Hub model in this machine's cache, or a
    name in the table. Raises `ConfigurationError`, which proposes the nearest name.
    """
    folder = find_hf_folder(model)
    if (folder / CONFIG).is_file():
        return shape_of(read_hf_config(folder), model)
    name = model.rpartition("/")[2].lower().removeprefix("meta-")
    if _QUANTISED.search(name):
        raise ConfigurationError(_quantised(model))
    # `Qwen/Qwen2.5-7B-Instruct` has the sizes of `qwen2.5-7b`.
    listed = [
        listed_name
        for listed_name in SHAPES
        if name == listed_name or name.startswith(f"{listed_name}-")
    ]
    if listed and not Path(model).exists():
        shape = SHAPES[max(listed, key=len)]
        return replace(shape, hub=model) if "/" in model else shape
    near = get_close_matches(name, SHAPES, n=1, cutoff=0.5)
    nearest = f"nearest: {near[0]}" if near else f"known: {', '.join(SHAPES)}"
    raise ConfigurationError(
        f"{model!r} is no checkpoint folder, no Hub name in this machine's cache and not in the "
        f"table of models; {nearest}; {missing_checkpoint(model)}"
    )


_QUANTISED = re.compile(
    r"[-_.](awq|gptq|gguf|ggml|exl[23]|mlx|bnb|fp[48]|nf4|mxfp4|nvfp4|int[48]|w[48]a(8|16)|[48]-?bit)"
    r"($|[-_.])",
    re.IGNORECASE,
)
"""Parts of the names of quantised models on the Hub."""


def _quantised(model: str) -> str:
    return (
        f"{model} holds quantised weights, which have no masters to train; give the original "
        "checkpoint"
    )


def shape_of(fields: Mapping[str, Any], name: str) -> ModelShape:
    """`fields` are those of a `config.json`; `name` is the model's. Raises `ConfigurationError` for
    a family whose parameters are not counted, and for a missing field.
    """
    if fields.get("quantization_config") or fields.get("quantization"):
        raise ConfigurationError(_quantised(name))
    family = fields.get("model_type")
    if family is None:
        raise ConfigurationError(
            f"{name}: its {CONFIG} has no model_type, so it is no model's; give the folder of a "
            "model (a run that made its own keeps it in RUN/model)"
        )
    if family not in (*DENSE, *EXPERTS):
        raise ConfigurationError(
            f"{name}: parameters of model type {family!r} are not counted; known are "
            f"{', '.join(DENSE)}"
        )
    try:
        heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
        return ModelShape(
            name=name,
            family=family,
            layers=int(fields["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(fields["intermediate_size"]),
            heads=heads,
            kv_heads=int(fields.get("num_key_value_heads") or heads),
            width=int(fields.get("head_dim") or hidden // heads),
            vocabulary=int(fields["vocab_size"]),
            positions=longest_positions(fields) or 32_768,
            tied=bool(fields.get("tie_word_embeddings", False)),
            experts=_experts_of(fields) if family in EXPERTS else None,
        )
    except KeyError as error:
        raise ConfigurationError(f"{name}: its configuration has no {error}") from None


def _experts_of(fields: Mapping[str, Any]) -> ExpertSizes:
    if fields["model_type"] == "mixtral":
        return ExpertSizes(
            int(fields["num_local_experts"]),
            int(fields["num_experts_per_tok"]),
            int(fields["intermediate_size"]),
        )
    return ExpertSizes(
        int(fields["num_experts"]),
        int(fields["num_experts_per_tok"]),
        int(fields["moe_intermediate_size"]),
    )
