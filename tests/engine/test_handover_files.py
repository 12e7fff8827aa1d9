"""The parts of a KV hand-over that know nothing of vLLM: its file, its folder, its rules."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_samples import V1, V2, ask, prompt
from hypothesis import given
from hypothesis import strategies as st

from producers.engines.base import UpdateMode
from producers.engines.drafts.segment import segment_folder
from producers.engines.vllm_engine.handover.file import (
    Front,
    encode_front,
    hash_of,
    read_body,
    read_front,
)
from producers.engines.vllm_engine.handover.place import Place, handover_folder
from producers.engines.vllm_engine.handover.rules import blocks_of_use, may_use
from producers.engines.vllm_engine.handover.shelf import Shelf
from producers.engines.vllm_engine.sequence import Sequence
from rollstream.config import load
from streams.errors import ConfigurationError, StoreError
from streams.records import Sampling, Version

BODY = bytes(range(256)) * 4
TOKENS = np.arange(64, dtype=np.uint32)


def front(**changes: object) -> Front:
    said = {
        "run": "run",
        "trajectory": "t/1",
        "versions": frozenset({V1, V2}),
        "layout": "[2, 3]",
        "block": 32,
        "tokens": TOKENS,
        "body_bytes": len(BODY),
        "body_hash": hash_of([BODY]),
    }
    return Front(**(said | changes))  # type: ignore[arg-type]


def written(path: Path, body: bytes = BODY) -> bytes:
    whole = encode_front(front()) + body
    path.write_bytes(whole)
    return whole


# ---- the file ----------------------------------------------------------------------------------


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    written(path)
    said = read_front(path)
    assert said is not None
    assert (said.run, said.trajectory, said.layout, said.block) == ("run", "t/1", "[2, 3]", 32)
    assert (said.versions, said.tokens.tolist()) == ({V1, V2}, TOKENS.tolist())
    read = read_body(path, said.identity)
    assert read is not None
    assert read[1].tobytes() == BODY
    assert read_body(path, "another") is None


@given(st.data())
def test_one_byte_other_or_missing_and_it_is_no_file(data: st.DataObject) -> None:
    path = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"kv-{os.getpid()}.kv"
    try:
        whole = written(path)
        said = read_front(path)
        assert said is not None
        at = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            path.write_bytes(whole[:at])
        else:
            other = (whole[at] + data.draw(st.integers(1, 255))) % 256
            path.write_bytes(whole[:at] + bytes([other]) + whole[at + 1 :])
        assert read_body(path, said.identity) is None
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("changes", [{"tokens": TOKENS + 1}, {"run": "b"}, {"layout": "[3, 2]"}])
def test_another_front_has_another_identity(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "a.kv"
    written(path)
    said = read_front(path)
    path.write_bytes(encode_front(front(**changes)) + BODY)
    other = read_front(path)
    assert said is not None
    assert other is not None
    assert said.identity != other.identity
    assert read_body(path, said.identity) is None


def test_what_is_no_ordinary_file_is_none_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kv")
    (tmp_path / "folder.kv").mkdir()
    written(tmp_path / "there.kv")
    (tmp_path / "link.kv").symlink_to(tmp_path / "there.kv")
    for name in ("pipe", "folder", "link", "nothing"):
        assert read_front(tmp_path / f"{name}.kv") is None


# ---- the rules ---------------------------------------------------------------------------------

NEWER_TERM = Version(2, 2)


@pytest.mark.parametrize(
    ("mode", "versions", "mine", "may"),
    [
        ("keep_version", {V1}, V1, True),
        ("keep_version", {V1}, V2, False),
        ("keep_version", {V1, V2}, V2, False),
        ("in_flight_recompute", {V2}, V2, True),
        ("in_flight_recompute", {V1, V2}, V2, False),
        ("in_flight", {V1, V2}, V2, True),
        ("in_flight", {V1}, V2, True),
        ("in_flight", {V1, V2}, V1, False),
        ("in_flight", {V2}, NEWER_TERM, True),
        ("in_flight", {NEWER_TERM}, V2, False),
        ("in_flight", set(), V2, False),
        ("keep_version", set(), V1, False),
    ],
)
def test_whose_kv_may_be_used(
    mode: UpdateMode, versions: set[Version], mine: Version, may: bool
) -> None:
    assert may_use(mode, versions, mine) == may


@given(st.integers(0, 6), st.integers(1, 200), st.integers(1, 40), st.data())
def test_blocks_are_whole_of_the_same_tokens_and_one_is_left(
    blocks: int, wanted: int, block: int, data: st.DataObject
) -> None:
    tokens = np.arange(max(blocks * block, wanted), dtype=np.uint32)
    computed, asked = tokens[: blocks * block], tokens[:wanted].copy()
    found = blocks_of_use(computed, asked, block)
    assert found == min(blocks, (wanted - 1) // block)
    if found:
        at = data.draw(st.integers(0, min(len(computed), wanted - 1) - 1))
        asked[at] += 1
        assert blocks_of_use(computed, asked, block) == 0


def test_kv_of_another_version_is_shared_with_nobody_until_it_is_recomputed() -> None:
    sequence = Sequence(ask("t", prompt(5), Sampling()), 96)
    sequence.draw_on(V2, {V2})
    assert (sequence.cached, sequence.salt(V2, 3)) == ({V2}, f"{V2}/3")
    sequence.draw_on(V2, {V1})
    assert (sequence.cached, sequence.salt(V2, 3)) == ({V1, V2}, f"{V2}/3/t")
    sequence.draw_on(V2)  # the next turn finds its own blocks
    assert (sequence.cached, sequence.salt(V2, 3)) == ({V1, V2}, f"{V2}/3/t")


@pytest.mark.parametrize("setting", ["url='http://host:1'", "tensor_parallel=2"])
def test_where_it_cannot_work_the_configuration_is_refused(tmp_path: Path, setting: str) -> None:
    config = tmp_path / "run.toml"
    vllm = f"[rollouts.vllm]\nkv_handover = true\n{setting}\n"
    config.write_text(f"[rollouts]\nengine = 'vllm'\ncount = 1\n{vllm}")
    with pytest.raises(ConfigurationError, match="kv_handover must be false with"):
        load(config, [], {})
    config.write_text(config.read_text().replace("true", "false"))
    assert load(config, [], {}).rollouts.vllm.kv_handover is False


# ---- the folder --------------------------------------------------------------------------------


def test_a_run_and_node_has_a_folder_beside_its_drafts(tmp_path: Path) -> None:
    folder = handover_folder("run", tmp_path, "node")
    assert folder.parent == segment_folder("run", tmp_path, "node").parent
    others = {handover_folder(r, tmp_path, n) for r, n in (("b", "node"), ("run", "b"))}
    assert len({folder, *others, segment_folder("run", tmp_path, "node")}) == 4


def test_a_second_file_of_a_trajectory_takes_the_place_of_the_first(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for body in (b"one", b"three"):
        shelf.put(shelf.path("../t"), [body, b"!"])
    assert shelf.path("../t").read_bytes() == b"three!"
    assert [p.name for p in tmp_path.iterdir() if p.name != "writing"] == [shelf.path("../t").name]


def test_the_oldest_go_first_and_what_is_too_large_is_not_written(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, bytes_max=250)
    for age, name in enumerate("abc"):
        shelf.put(shelf.path(name), [bytes(100)])
        os.utime(shelf.path(name), ns=(age, age))
    assert [shelf.path(name).exists() for name in "abc"] == [False, True, True]
    with pytest.raises(StoreError, match="251 bytes"):
        shelf.put(shelf.path("d"), [bytes(251)])
    assert [shelf.path(name).exists() for name in "bcd"] == [True, True, False]


def test_a_folder_that_is_gone_is_an_error_that_says_so(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "gone")
    with pytest.raises(StoreError, match="gone"):
        shelf.put(shelf.path("t"), [b"x"])


HOLDS = """
import sys, time
from pathlib import Path
from producers.engines.vllm_engine.handover import shelf
from producers.engines.vllm_engine.handover.place import Place

place = Place(Path(sys.argv[1]))
mine = shelf.Shelf(place.folder)
mine.put(mine.path("whole"), [b"whole"])
shelf._write = lambda *_: (print("writing", flush=True), time.sleep(600))
mine.put(mine.path("half"), [b"half"])
"""


def test_what_a_killed_writer_left_goes_with_the_next_and_whole_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    place = Place(folder)
    with killed_while_writing(folder) as writer:
        shelf = Shelf(folder)
        shelf.put(shelf.path("mine"), [b"mine"])
        assert len(list(folder.glob("*.partial"))) == 1  # it lives
        os.kill(writer.pid, signal.SIGKILL)
    shelf.put(shelf.path("mine"), [b"again"])
    assert list(folder.glob("*.partial")) == []
    assert shelf.path("whole").read_bytes() == b"whole"
    place.leave()
    assert not folder.exists()


def test_what_a_killed_run_left_goes_with_the_next_of_its_name_or_of_another(
    tmp_path: Path,
) -> None:
    folder = tmp_path / f"rollstream-{os.getuid()}-0-kv"
    for next_one in (folder, tmp_path / f"rollstream-{os.getuid()}-1-kv"):
        with killed_while_writing(folder) as writer:
            beside = Place(next_one)
            assert Shelf(folder).path("whole").exists()
            beside.leave()
            os.kill(writer.pid, signal.SIGKILL)
        assert len(list(folder.glob("*.partial"))) == 1
        place = Place(next_one)
        assert list(folder.glob("*.kv")) == list(folder.glob("*.partial")) == []
        place.leave()
        assert not next_one.exists()


def test_the_last_one_takes_everything_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    first, second = Place(folder), Place(folder)
    shelf = Shelf(folder)
    shelf.put(shelf.path("t"), [b"x"])
    first.leave()
    first.leave()
    assert shelf.path("t").exists()
    second.leave()
    assert not folder.exists()


def test_a_folder_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        Place(tmp_path / "file")


def killed_while_writing(folder: Path) -> "subprocess.Popen[str]":
    """A process that lives in the folder and is in the midst of a file; the caller kills it."""
    root = str(Path(__file__).parents[2])
    writer = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    return writer
