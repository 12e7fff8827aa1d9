"""Every parser of foreign text and bytes takes its input, or refuses it by a documented error."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given

from rollstream.consumers.trainer.build import load_first
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.errors import EXIT_REFUSED, ConfigurationError, CorruptObject, RollstreamError
from rollstream.keep.fork import find_checkpoint
from rollstream.look.query.fields import FieldCondition
from rollstream.look.report.serve import parse_address
from rollstream.producers.tasks.dataset_rows import DatasetColumns, SkippedRows, read_rows
from rollstream.run.cli.look.checkpoints import kept_checkpoint
from rollstream.run.cli.main import main
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import overrides_layer
from rollstream.run.sizes.devices import parse_gpus
from rollstream.storage.stores.json_objects import seal, unseal
from rollstream.storage.weights.checkpoints import (
    CheckpointManifest,
    read_checkpoint,
    stored_checkpoints,
    write_checkpoint,
)
from testbed.hostile.parsers.catalogue import fuzzed_parsers
from testbed.hostile.parsers.stores import STATE
from testbed.memory import MemoryStore
from tests.edges.fuzz.damage import RANDOM, examples

PARSERS = fuzzed_parsers()


@pytest.mark.parametrize("name", PARSERS)
@given(drawn=RANDOM)
@examples(100)
def test_any_input_is_parsed_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory, drawn: Random
) -> None:
    folder = tmp_path_factory.mktemp("fuzzed")
    PARSERS[name].is_parsed(PARSERS[name].damaged(drawn), folder)
    shutil.rmtree(folder)


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "read",
    [
        lambda: parse_gpus(""),
        lambda: parse_gpus("8xH\n100"),
        lambda: parse_gpus(f"{DIGITS}xH100"),
        lambda: parse_address(f"127.0.0.1:{DIGITS}"),
        lambda: parse_address("127.0.0.1:\u0661"),
        lambda: find_checkpoint(MemoryStore(), DIGITS),
        lambda: kept_checkpoint(MemoryStore(), "²"),
        lambda: TrainerState.decode({"step": "x"}),
        lambda: TrainerState.decode({**STATE, "positions": {"ledger": {"²": {}}}}),
    ],
)
def test_texts_that_no_parser_took_are_refused(read: Callable[[], object]) -> None:
    with pytest.raises(RollstreamError):
        read()


@pytest.mark.parametrize("text", [DIGITS, "[" * 5000, "{a=" * 5000])
def test_a_value_that_is_no_toml_is_text(text: str) -> None:
    layers = overrides_layer([f"trainer.steps={text}"], Configuration)
    assert layers.values == {"trainer": {"steps": text}}


@pytest.mark.parametrize("part", ["²", "\u0661", DIGITS, "-1"])
def test_a_place_in_a_list_that_is_no_number_has_no_value(part: str) -> None:
    condition = FieldCondition(("spans", part, "version"), "=", "null")
    assert condition.holds({"spans": [{"version": 1}]})


@pytest.mark.parametrize(("operator", "holds"), [("=", False), ("!=", True), ("<", False)])
def test_a_number_is_unequal_to_any_text_that_is_none(operator: str, holds: bool) -> None:
    condition = FieldCondition(("scores", "style"), operator, "3,")
    assert condition.holds({"scores": {"style": 0.5}}) is holds


@pytest.mark.parametrize("words", [["report"], ["tail", "ledger"], ["ls"], ["run"], ["rm"]])
def test_a_name_too_long_for_a_file_is_refused_by_name(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "x" * 5000]) == EXIT_REFUSED
    assert "too long" in capsys.readouterr().err


def test_a_checkpoint_whose_state_is_no_trainers_is_skipped() -> None:
    store = MemoryStore()
    tensors = {"w": torch.zeros(2)}
    write_checkpoint(store, 1, 1, tensors, TrainerState.decode(STATE).encode())
    write_checkpoint(store, 2, 1, tensors, {"step": [2]})
    loaded: list[object] = []

    class Loader:
        def load_state(self, tensors: object) -> None:
            loaded.append(tensors)

    ids = [stored.id for stored in reversed(stored_checkpoints(store))]
    state = load_first(store, Loader(), ids)  # pyright: ignore[reportArgumentType]
    assert state is not None
    assert (state.step, len(loaded)) == (STATE["step"], 1)


def test_a_tensor_of_a_checkpoint_lies_within_its_file() -> None:
    store = MemoryStore()
    one = write_checkpoint(store, 1, 1, {"w": torch.zeros(2)}, {})
    key = f"{one.folder}/manifest.json"
    manifest = unseal(store.get(key), CheckpointManifest, key)
    for start, end in ((1 << 31, 120), (1 << 31, (1 << 31) + 8)):
        entry = dataclasses.replace(manifest.tensors.tensors["w"], start=start, end=end)
        tensors = dataclasses.replace(manifest.tensors, tensors={"w": entry})
        store.put(key, seal(dataclasses.replace(manifest, tensors=tensors)))
        with pytest.raises(CorruptObject, match="tensor w is"):
            read_checkpoint(store, one)


def test_a_date_beyond_pythons_in_a_data_set_is_refused(tmp_path: Path) -> None:
    arrow: Any = pa  # its stubs have only what the product uses
    table = arrow.table({"prompt": ["a"], "reference": arrow.array([1 << 30], arrow.date32())})
    pq.write_table(table, tmp_path / "rows.parquet")
    skipped = SkippedRows("rows")
    columns = DatasetColumns("prompt", "reference", "")
    assert list(read_rows([tmp_path / "rows.parquet"], columns, skipped)) == []
    with pytest.raises(ConfigurationError, match="cannot be converted"):
        skipped.check()
