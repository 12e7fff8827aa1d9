"""Runs and a program of earlier releases, described in README.md."""

from pathlib import Path

RUN_OF_0_1_0 = Path(__file__).with_name("run_of_0_1_0.tar.zst")
PROGRAM_OF_2026_11_23 = Path(__file__).with_name("program_of_2026_11_23.tar.zst")
