"""Runs that earlier releases recorded, described in README.md."""

from pathlib import Path

RUN_OF_0_1_0 = Path(__file__).with_name("run_of_0_1_0.tar.zst")
