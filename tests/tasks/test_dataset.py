"""Prompts from a file: splits, verifiers, and every fault of a file."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Option
from rollstream.producers.tasks.dataset import Dataset
from rollstream.producers.tasks.dataset_rows import DatasetColumns, SkippedRows, read_rows
from rollstream.producers.tasks.registry import load_task

VERIFIERS = """
def equal(answer, reference):
    return answer == reference["answer"]

def whole(answer, reference):
    from rollstream.api import Score
    return Score(0.5, {"length": len(answer)})

def scored(answer, reference):
    return 0.5, {"length": len(answer)}

def odd(answer, reference):
    return 1.0, 2.0, 3.0

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with verifiers in it."""
    (tmp_path / "checks.py").write_text(VERIFIERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "checks", raising=False)
    return tmp_path


def write(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS = [
    {"prompt": f"What is {n}?", "reference": {"answer": str(n)}, "worked": f"={n}"}
    for n in range(200)
]


def dataset(limit: int | None = None, **options: Option) -> Dataset:
    given = {"path": "rows.jsonl", "verifier": "checks:equal"} | options
    task = load_task(TaskSettings(name="dataset", options=given), limit)
    assert isinstance(task, Dataset)
    return task


def test_the_order_is_a_fresh_permutation_in_each_epoch(folder: Path):
    write(folder / "rows.jsonl", ROWS[:150])
    write(folder / "other.jsonl", ROWS[150:])
    task, count = dataset(held_out="other.jsonl"), 150
    first = [task.prompt(3, position) for position in range(2 * count)]
    assert [prompt.epoch for prompt in first] == [0] * count + [1] * count
    assert len({prompt.tokens for prompt in first[:count]}) == count
    assert {p.tokens for p in first[:count]} == {p.tokens for p in first[count:]}
    assert [p.tokens for p in first[:count]] != [p.tokens for p in first[count:]]
    assert dataset(held_out="other.jsonl").prompt(3, count + 5) == first[count + 5]


def test_what_is_held_out_stays_so_when_rows_are_added_and_equal_prompts_stay_together(
    folder: Path,
):
    write(folder / "rows.jsonl", ROWS[:100])
    before = {prompt.tokens for prompt in dataset().held_out(5)}
    write(folder / "rows.jsonl", [*reversed(ROWS), *ROWS])
    task = dataset()
    training = {task.prompt(0, position).tokens for position in range(360)}
    held_out = {prompt.tokens for prompt in task.held_out(20)}
    assert not training & held_out
    assert not training & before
    assert {prompt.tokens for prompt in dataset(held_out_share=0.5).held_out(100)} >= held_out


def test_the_held_out_rows_may_be_a_second_file(folder: Path):
    write(folder / "rows.jsonl", ROWS[:50])
    write(folder / "other.jsonl", ROWS[50:60])
    task = dataset(held_out="other.jsonl")
    assert len(task.held_out(10)) == 10
    assert len({task.prompt(0, position).tokens for position in range(50)}) == 50
    write(folder / "other.jsonl", ROWS[48:60])
    again = dataset(held_out="other.jsonl")
    assert again.held_out(10) == task.held_out(10)
    assert "other.jsonl, line 1: its prompt is in rows" in again.skipped_rows()[1].named[0]


def test_a_verifier_gives_a_reward_or_a_reward_and_scores(folder: Path):
    reference = json.dumps({"answer": "7"})
    assert dataset().judge(reference, [[*b"7", 258]]).reward == 1
    assert dataset().judge(reference, [[*b"8", 258]]).reward == 0
    for verifier in ("checks:scored", "checks:whole"):
        scored = dataset(verifier=verifier).judge(reference, [[*b"abc", 258]])
        assert (scored.reward, dict(scored.scores)) == (0.5, {"length": 3})
    with pytest.raises(TypeError, match=r"not a reward or \(reward, scores\)"):
        dataset(verifier="checks:odd").judge(reference, [[258]])


def test_judging_reads_no_file():
    assert dataset(path="nowhere.jsonl").judge('{"answer": "7"}', [[*b"7"]]).reward == 1


def test_parquet_and_chat_messages_and_other_column_names(folder: Path):
    messages = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1"}]
    table = pa.table({"messages": [messages] * 3, "gold": [2, 2, 2], "extra": [0.5, 0.5, 0.5]})
    pq.write_table(table, folder / "rows.parquet")
    columns = {"prompt": "messages", "reference": "gold", "held_out_share": 1e-9}
    prompt = dataset(path="rows.parquet", **columns).prompt(0, 0)
    assert bytes(t for t in prompt.tokens if t < 256) == b"Sum.1+1"
    assert prompt.reference == "2"


def test_chat_messages_may_stand_as_json_in_a_column(folder: Path):
    chat = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    texts = [json.dumps(chat), '[{"a": 1}] is JSON', "[1]"]
    write(folder / "rows.jsonl", [{"prompt": text, "reference": 1} for text in texts])
    columns, skipped = DatasetColumns("prompt", "reference", ""), SkippedRows("rows")
    rows = list(read_rows([folder / "rows.jsonl"], columns, skipped))
    assert [row.prompt for row in rows] == [chat, *texts[1:]]
    write(folder / "rows.jsonl", [{"prompt": repr(chat), "reference": 1}])
    assert not list(read_rows([folder / "rows.jsonl"], columns, skipped))
    assert "as Python prints them: write them as JSON" in skipped.listed()


def test_answers_are_taught_where_their_column_is_named(folder: Path):
    write(folder / "rows.jsonl", ROWS)
    taught = dataset(answer="worked").documents(0, 30)
    assert all(bytes(one.response[:-1]).startswith(b"=") for one in taught)
    with pytest.raises(ConfigurationError, match=r"name their column as task.options.answer"):
        dataset().documents(0, 1)


def test_answers_may_be_whole_numbers(folder: Path):
    write(folder / "rows.jsonl", [row | {"worked": 7} for row in ROWS])
    assert bytes(dataset(answer="worked").documents(0, 1)[0].response[:-1]) == b"7"
    write(folder / "rows.jsonl", [row | {"worked": 7.5} for row in ROWS])
    with pytest.raises(ConfigurationError, match="worked must be text or a whole number"):
        dataset(answer="worked").documents(0, 1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "data set rows.jsonl is empty"),
        ("\n \n", "data set rows.jsonl is empty"),
        ('{"prompt": "a", "reference": 1}\n{"prompt": ', "rows.jsonl, line 2: not JSON"),
        ("[1]", "item 1: must be an object of columns, got 1"),
        ("[1]\n[2]", "line 1: must be an object of columns, got [1]"),
        (b'{"prompt": "\xff"}', "line 1: not JSON: 'utf-8' codec"),
        ('\n{"promt": "a"}', "line 2: no column 'prompt' (task.options.prompt); did you mean"),
        ('{"prompt": "a"}', "no column 'reference' (task.options.reference); it has prompt"),
        ('{"prompt": 3, "reference": 1}', "prompt must be text or a list of chat messages, got 3"),
        ('{"prompt": "", "reference": 1}', "line 1: prompt must be text or a list"),
        ('{"prompt": [{"role": 1}], "reference": 1}', "with role and content, got {'role': 1}"),
        (
            '{"prompt": [{"role": "assistant", "content": "a"}], "reference": 1}',
            "line 1: the last message of prompt is the assistant's",
        ),
    ],
)
def test_a_row_that_is_no_prompt_is_named(folder: Path, lines: str | bytes, message: str):
    text = lines if isinstance(lines, bytes) else lines.encode()
    (folder / "rows.jsonl").write_bytes(text)
    with pytest.raises(ConfigurationError) as caught:
        dataset().prompt(0, 0)
    assert message in str(caught.value)


def test_prompts_that_are_too_long_are_counted_and_named_at_once(folder: Path):
    """`likely_tokens_max` saves tokenizing short ones and misses no long one."""
    long = [{"prompt": "x" * length, "reference": 0} for length in (90, 200, 300)]
    write(folder / "rows.jsonl", [*ROWS, *long, *long[1:] * 4])
    with pytest.raises(ConfigurationError) as caught:
        dataset(limit=150).count_long_rows(Event())
    assert "10 of 211 rows cannot be used" in str(caught.value)
    assert "line 211: 304 tokens are more than the 150 that" in str(caught.value)
    assert "likewise line 209" in str(caught.value)


def test_files_that_are_missing_broken_or_of_another_kind_are_reported(folder: Path):
    for path, message in (
        ("none.jsonl", "no such file; paths are relative to the working directory"),
        (
            "rows.bin",
            "only .jsonl, .json, .csv, .tsv (also .gz and .zst) and .parquet files are read",
        ),
        ("broken.parquet", "is not a readable Parquet file"),
    ):
        (folder / "broken.parquet").write_text("not Parquet")
        (folder / "rows.bin").write_text("not rows")
        with pytest.raises(ConfigurationError) as caught:
            dataset(path=path).prompt(0, 0)
        assert message in str(caught.value)


def test_splits_that_leave_nothing_or_too_little_are_reported(folder: Path):
    write(folder / "rows.jsonl", ROWS[:3])
    with pytest.raises(ConfigurationError, match="all 3 rows are held out"):
        dataset(held_out_share=0.999999).prompt(0, 0)
    with pytest.raises(ConfigurationError, match="200 asked for, the data set holds out"):
        dataset().held_out(200)
    with pytest.raises(ConfigurationError, match="held_out_share must be at least 0"):
        dataset(held_out_share=1.5)


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("checks", "task.options.verifier = 'checks': write it as `module:attribute`"),
        ("chekcs:equal", "module 'chekcs' cannot be imported"),
        ("checks:eqaul", "no callable 'eqaul'; did you mean 'equal'"),
        ("checks:number", "has 'number', which is not callable"),
    ],
)
def test_a_verifier_that_is_none_is_reported(verifier: str, message: str):
    with pytest.raises(ConfigurationError) as caught:
        dataset(verifier=verifier)
    assert message in str(caught.value)
