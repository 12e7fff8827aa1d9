"""Files that commands write where the user says: links, pipes and devices stay what they are."""

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollstream.whole_file import check_output, output_file, whole_file
from testbed.first_hour.looked_at_run import copied_run
from testbed.first_hour.output_cases import printed

COMMANDS: dict[str, tuple[str, ...]] = {
    "report": ("report", "RUN", "--output", "FILE"),
    "overlay": ("report", "RUN", "RUN", "--output", "FILE"),
    "trace": ("trace", "RUN", "--perfetto", "FILE"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied_run(tmp_path_factory.mktemp("run") / "run")


def called(words: tuple[str, ...], run: Path, file: Path) -> tuple[int, str]:
    names = {"RUN": str(run), "FILE": str(file)}
    code, _, errors = printed([names.get(word, word) for word in words])
    return code, errors


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_link_that_the_user_named_stays_and_its_target_is_written(words, run, tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target.name)
    assert called(words, run, link)[0] == 0
    assert link.is_symlink()
    assert target.stat().st_size > 500
    assert set(os.listdir(tmp_path)) == {"target", "link"}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_full_device_is_an_error_and_stays(words, run, tmp_path):
    """By a link, so that a fault here cannot replace the device of the machine."""
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    code, errors = called(words, run, link)
    assert code == 1
    assert f"{link}: No space left on device" in errors
    assert stat.S_ISCHR(link.stat().st_mode)


def test_a_named_pipe_gets_the_whole_content(tmp_path):
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with output_file(pipe) as partial:
        partial.write_bytes(b"x" * 200_000)
    reader.join()
    assert read == [b"x" * 200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_in_a_received_folder_is_replaced(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("mine")
    link.symlink_to(victim)
    writers: list[Callable] = [whole_file, lambda path: output_file(path, is_typed=False)]
    for writer in writers:
        with writer(link) as partial:
            partial.write_text("page")
        assert (link.is_symlink(), link.read_text(), victim.read_text()) == (False, "page", "mine")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_the_folder_is_looked_at_before_the_run_is_read(words, run, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "config.json", begun)
    code, errors = called(words, begun, tmp_path / "missing" / "file")
    assert code == 1
    assert errors.startswith(f"rollstream: {tmp_path}/missing/file: No such file")


def test_an_output_is_checked_without_a_trace(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("new", "file", "pipe"):
        check_output(tmp_path / name)
    for path in (tmp_path, tmp_path / "file" / "new"):
        with pytest.raises(OSError, match="a directory"):
            check_output(path)
    assert set(os.listdir(tmp_path)) == {"file", "pipe"}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_an_error_names_the_file_that_the_user_named_and_advises(words, run, tmp_path):
    path = tmp_path / "missing" / "file"
    code, errors = called(words, run, path)
    assert (code, errors) == (
        1,
        f"rollstream: {path}: No such file or directory; nothing has this name: correct the path\n",
    )
