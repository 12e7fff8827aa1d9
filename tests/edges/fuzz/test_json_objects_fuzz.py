"""Small JSON objects of a store that somebody else wrote: a value or a typed error."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.persistence import PersistedState
from rollstream.errors import ConfigurationError, CorruptObject
from rollstream.foreign_json import DEPTH_MAX, parse_json, parse_loose_json
from rollstream.run.config.sources import file_layer
from rollstream.storage.identity import IDENTITY_KEY, RunIdentity, read_identity
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.stores.json_objects import decode_json, encode_json, seal, unseal
from rollstream.storage.terms import NameRecord, RoleRecord, TermGeneration, read_role, role_key
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer, read_pointer
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from tests.edges.fuzz.damage import TAILS, changed_bytes, checked, damaged_json, examples

OBJECTS: tuple[Any, ...] = (
    Pointer("r", 2, Version(3, 1), "weights/v00000003-t0001/manifest.json", "0" * 32, None),
    RoleRecord("trainer", 2, "host/7", "abc", 4, 10.0, False),
    NameRecord("rollouts", "r0", 3),
    TermGeneration("rollouts", 3),
    RunIdentity("0" * 16, "r", "1" * 32, "0.3", ("redundancy",)),
    PersistedState(1, {"trajectories": {}}, orders=()),
)
CONFIGURATION = json.dumps(
    {"run": {"name": "r"}, "trainer": {"groups": 4, "lr": 1e-5}, "list": [1, {"a": [2]}]}
).encode()


@given(damaged_json([encode_json(sample) for sample in OBJECTS]))
@examples(120)
def test_an_object_of_a_store_is_read_or_refused(data: bytes) -> None:
    for sample in OBJECTS:
        value = checked(lambda sample=sample: decode_json(data, type(sample), "key"))
        assert value is None or isinstance(value, type(sample))
    store = MemoryStore()
    for key in (POINTER_KEY, IDENTITY_KEY, role_key("trainer")):
        store.put(key, data)
    checked(lambda: read_pointer(store))
    checked(lambda: read_identity(store))
    checked(lambda: read_role(store, "trainer"))


@given(st.data())
@examples(40)
def test_a_sealed_object_is_read_or_refused(data: st.DataObject) -> None:
    sealed = changed_bytes(data.draw, seal(OBJECTS[0]))
    value = checked(lambda: unseal(sealed, Pointer, "key"))
    assert value in (None, OBJECTS[0])


@given(damaged_json([CONFIGURATION]))
@examples(60)
def test_a_recorded_configuration_can_be_written_again(data: bytes) -> None:
    value = checked(lambda: decode_json(data, dict[str, Any], "configuration.json"))
    if value is not None:
        json.dumps(value)


@pytest.mark.parametrize("tail", TAILS)
def test_every_odd_text_is_refused_by_name(tail: bytes) -> None:
    for data in (tail, b'{"term":' + tail, b'{"x":' + tail + b"}", b'{"run":"' + tail + b'"}'):
        with pytest.raises(CorruptObject, match="roles/x"):
            decode_json(data, RoleRecord, "roles/x")


@pytest.mark.parametrize("parse", [lambda d: parse_json(d, dict[str, Any]), parse_loose_json])
def test_depth_has_a_bound_in_values_of_any_type(parse: Any) -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    parse(nested(DEPTH_MAX))
    parse(b'{"a":[' + b"[]," * 3000 + b"[]]}")
    for depth in (DEPTH_MAX + 2, 900, 100_000):
        with pytest.raises(ValueError, match="nested"):
            parse(nested(depth))


TOML = b'[run]\nname = "r"\n[trainer]\nlr = 1e-5\nlist = [1, {a = 2}]\n'


@given(st.sampled_from([".toml", ".json"]), st.data())
@examples(60)
def test_a_configuration_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzzed{suffix}"
    path.write_bytes(changed_bytes(data.draw, TOML if suffix == ".toml" else CONFIGURATION))
    checked(lambda: file_layer(path))


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, '{"x": ' + "[" * 5000, "x = " + "9" * 5000])
def test_a_configuration_file_that_no_parser_ends_is_refused(text: str, tmp_path: Path) -> None:
    for suffix in (".toml", ".json"):
        path = tmp_path / f"run{suffix}"
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="is no valid"):
            file_layer(path)


@given(st.data())
@examples(40)
def test_a_metrics_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_bytes(changed_bytes(data.draw, b'{"time_s":1.5,"loss":2}\n' * 3))
    lines = checked(lambda: read_metrics(path))
    assert lines is None or all(isinstance(line, dict) for line in lines)
