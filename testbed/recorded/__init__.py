"""Runs and a program of earlier releases, described in README.md."""

import io
import tarfile
from pathlib import Path

import zstandard

RUN_OF_0_1_0 = Path(__file__).with_name("run_of_0_1_0.tar.zst")
PROGRAM_OF_2026_11_23 = Path(__file__).with_name("program_of_2026_11_23.tar.zst")


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks one of these archives into `folder`."""
    with archive.open("rb") as file:
        data = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(file).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter="data")
