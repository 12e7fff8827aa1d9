"""Metrics files: whole lines only."""

import subprocess
import sys
from itertools import pairwise

import pytest

from rollstream.errors import CorruptObject
from rollstream.look.monitor.feed import JsonLinesTail
from rollstream.run.metrics.forwarder import FilePosition, read_lines
from rollstream.storage.metrics_file import MetricsFile, read_metrics


def test_lines_come_back_in_order_with_null_for_nan(tmp_path):
    with MetricsFile(tmp_path / "metrics" / "trainer.jsonl") as metrics:
        metrics.append({"step": 1, "loss": float("nan"), "deep": {"x": [float("inf"), 2.5]}})
        metrics.append({"step": 2, "name": "ü\n"})
    assert read_metrics(tmp_path / "metrics" / "trainer.jsonl") == [
        {"step": 1, "loss": None, "deep": {"x": [None, 2.5]}},
        {"step": 2, "name": "ü\n"},
    ]


def test_a_torn_last_line_is_ignored_and_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsFile(path) as metrics:
        metrics.append({"step": 3})
    assert path.read_bytes() == b'{"step":1}\n{"step":3}\n'


def test_a_file_of_one_torn_line_and_no_file_are_empty(tmp_path):
    path = tmp_path / "m.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(b'{"st')
    assert read_metrics(path) == []
    MetricsFile(path).close()
    assert path.read_bytes() == b""


def test_a_reader_sees_each_line_as_soon_as_it_is_appended(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as metrics:
        for step in range(5):
            metrics.append({"step": step})
            assert len(read_metrics(path)) == step + 1


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\nnonsense\n')
    with pytest.raises(CorruptObject, match="line 2"):
        read_metrics(path)


def test_a_line_that_does_not_fit_leaves_no_half_of_it(tmp_path):
    script = """
import resource, signal, sys
from rollstream.storage.metrics_file import MetricsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
metrics = MetricsFile(sys.argv[1])
metrics.append({"step": 1})
try:
    metrics.append({"text": "x" * 200})
except OSError as error:
    print(type(error).__name__, error)
metrics.append({"step": 2})
"""
    path = tmp_path / "m.jsonl"
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert run.stdout.startswith("StoreError cannot write"), run.stderr
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_file_stays_bounded_and_keeps_its_begin_and_its_newest_lines(tmp_path):
    path = tmp_path / "trainer.jsonl"
    with MetricsFile(path, bytes_max=4000) as metrics:
        for step in range(3000):
            metrics.append({"step": step, "time_s": step / 7})
            assert path.stat().st_size <= 4000
    steps = [line["step"] for line in read_metrics(path)]
    assert steps[0] == 0
    assert steps == sorted(set(steps))
    assert set(range(2960, 3000)) <= set(steps)
    assert max(later - step for step, later in pairwise(steps)) < 300, "sparse, with no gap"
    assert [one.name for one in tmp_path.iterdir()] == ["trainer.jsonl"]


def test_readers_continue_behind_their_last_line_in_a_thinned_file(tmp_path):
    path = tmp_path / "trainer.jsonl"
    tail, place, tailed, forwarded = JsonLinesTail(path), FilePosition(), [], []
    with MetricsFile(path, bytes_max=1000) as metrics:
        for step in range(500):
            metrics.append({"step": step})
            tailed += [line["step"] for line in tail.read()]
            for line in read_lines(path, place):
                assert line.values is not None
                forwarded.append(line.values["step"])
                place = line.after
    assert tailed == forwarded == list(range(500))
