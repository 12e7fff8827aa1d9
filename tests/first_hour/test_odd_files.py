"""Data files in odd forms lose no row without a word, and a check counts what a run counts."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.rewards.pool import RewardVerdict
from rollstream.producers.rollout.evaluation import JudgedAnswer, measure
from rollstream.producers.rows.data_files import data_files
from rollstream.producers.rows.row_files import RowFault, read_file_rows
from rollstream.producers.tasks import dataset_rows, dataset_survey
from rollstream.producers.tasks.base import Document, plain_documents
from rollstream.producers.tasks.dataset_survey import DatasetSurvey, survey_dataset
from rollstream.producers.tasks.mixture import MixturePart, mix
from rollstream.run.checks.fitting import fit_data
from rollstream.run.checks.task import TaskAnswer, task_findings
from rollstream.run.checks.task_facts import TaskFacts, TaskOrder
from rollstream.run.checks.task_process import task_facts
from rollstream.run.config.settings import Configuration
from rollstream.storage.starting_model.manifest import ModelSource
from testbed.first_hour.brought_data import ROWS, data_set


def rows_of(path: Path) -> tuple[list[tuple[str, Any]], list[str]]:
    good, faults = list[tuple[str, Any]](), list[str]()
    for row in read_file_rows(path, ["prompt", "reference"]):
        if isinstance(row, RowFault):
            faults.append(row.place)
        else:
            good.append((row[1]["prompt"], row[1]["reference"]))
    return good, faults


def json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("bad", ['"open,1', '"wide" is,"5', 'inch 5?,"5'])
def test_a_quote_without_its_end_takes_its_own_line_alone(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "a.csv"
    before, after = [f"q{n},{n}" for n in range(5)], [f"r{n},{n}" for n in range(5)]
    path.write_text("\n".join(["prompt,reference", *before, bad, *after, '"a, b",c']) + "\n")
    good, faults = rows_of(path)
    assert [prompt for prompt, _ in good] == [*(f"q{n}" for n in range(5)),
                                              *(f"r{n}" for n in range(5)), "a, b"]  # fmt: skip
    assert faults == ["line 7"]


def test_a_quoted_field_may_have_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "reference"], ["two\nlines", 'say "hi"'], ["x", 1]])
    assert rows_of(path) == ([("two\nlines", 'say "hi"'), ("x", "1")], [])


def test_quotes_that_quote_nothing_are_kept_in_a_table_of_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('prompt\treference\n"Hello" she said\t1\n"Open\t2\n"a\tb"\t3\nlast\t4\n')
    good, faults = rows_of(path)
    assert good == [('"Hello" she said', "1"), ('"Open', "2"), ("a\tb", "3"), ("last", "4")]
    assert not faults


def test_spaces_behind_commas_are_parts_of_values_only_where_the_header_has_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt, reference\nWhat, 0\n"a, b", "c"\n')
    assert rows_of(path) == ([("What", "0"), ("a, b", "c")], [])
    path.write_text("prompt,reference\nWhat, 0\n")
    assert rows_of(path) == ([("What", " 0")], [])


@pytest.mark.parametrize("name", ["A.CSV", "b.Csv.GZ", "c.csv"])
def test_a_suffix_may_have_capitals_and_a_header_commas(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = b'prompt;reference;"x, y"\nq;1;2\n'
    path.write_bytes(gzip.compress(text) if name.endswith("GZ") else text)
    assert rows_of(path) == ([("q", "1")], [])
    assert data_files(str(tmp_path)) == [path]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet",
             "test-00000-of-00001.parquet"],
            "test ({0}/test-00000-of-00001.parquet), train ({0}/train-*); name the one",
        ),
        (["my_dev.jsonl", "my_train.jsonl"], "validation ({0}/my_dev.jsonl), train ({0}/my_train"),
        (["a.jsonl", "b.jsonl", "train-00000-of-00001.parquet", "contest.jsonl"], ""),
    ],
)  # fmt: skip
def test_the_splits_of_a_folder_are_not_read_as_one(
    tmp_path: Path, names: list[str], message: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert len(data_files(f"{tmp_path}/*")) == len(names)
    if not message:
        assert len(data_files(str(tmp_path))) == len(names)
        return
    with pytest.raises(ConfigurationError) as refused:
        data_files(str(tmp_path))
    assert message.format(tmp_path) in str(refused.value)


def test_a_large_json_list_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    monkeypatch.setattr(dataset_survey, "WHOLE_BYTES_MAX", 0)
    survey = survey_dataset(data_set(path))
    assert (survey.rows, survey.sampled) == (len(ROWS), len(ROWS))


def test_a_compressed_table_keeps_its_kind_in_the_store(tmp_path: Path) -> None:
    source = ModelSource(tmp_path, None, ("a.csv.gz", "b.jsonl", "~/c.v1.tsv.zst"))
    assert list(source.named_task_files().values()) == [
        "task/0.csv.gz",
        "task/1.jsonl",
        "task/2.tsv.zst",
    ]


def test_held_out_rows_need_no_answer_and_may_be_trained_on(tmp_path: Path) -> None:
    rows = [{**row, "answer": row["reference"]} for row in ROWS]
    path = json_lines(tmp_path / "train.jsonl", rows)
    extra = [{"prompt": f"other {n}", "reference": "1"} for n in range(20)]
    held_out = json_lines(tmp_path / "test.jsonl", [*ROWS[:2], *extra])
    task = data_set(path, held_out=str(held_out), answer="answer")
    task.read_rows()
    assert len(task.held_out(20)) == 20
    survey = survey_dataset(task)
    assert (survey.faults, survey.shared, survey.too_many, survey.held_out) == (0, 2, False, 20)
    assert "is in" in survey.named[0]


def test_a_reference_that_no_record_holds_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_rows, "REFERENCE_BYTES_MAX", 1000)
    large = {"prompt": "large", "reference": "x" * 1000}
    survey = survey_dataset(data_set(json_lines(tmp_path / "a.jsonl", [*ROWS, large])))
    assert survey.faults == 1
    assert "line 301" in survey.named[0]
    assert "1,002 bytes" in survey.named[0]


def lines_of(task: Any, context_max: int = 128) -> dict[str, tuple[str, str]]:
    """What a check says about the data set, by subject."""
    c = Configuration.model_validate(
        {"rollouts": {"context_max": context_max}, "sampling": {"tokens_max": 28},
         "task": {"name": "dataset"}, "evaluation": {"enabled": False}}
    )  # fmt: skip
    facts = task_facts(task, TaskOrder(0, context_max - 28, None, False, False, False))
    findings = task_findings(c, TaskAnswer(facts, [""]))
    return {finding.subject: (finding.verdict, finding.text) for finding in findings}


def test_a_sample_is_not_compared_with_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 30 % of the rows that are read are bad, and these are few of all."""
    monkeypatch.setattr(dataset_survey, "WHOLE_BYTES_MAX", 0)
    rows: list[dict[str, Any]] = [
        {"prompt": f"q{n}" if n % 3 or n > 1000 else [], "reference": "1"} for n in range(40_000)
    ]
    verdict, text = lines_of(data_set(json_lines(tmp_path / "a.jsonl", rows)))["data"]
    assert verdict == "warning"
    assert "the run ends if the rest is like" in text


def test_long_prompts_beyond_those_counted_are_not_called_skipped(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n} " + "x" * (200 if n % 20 == 0 else 3), "reference": "1"}
        for n in range(60_000)
    ]
    verdict, text = lines_of(data_set(json_lines(tmp_path / "a.jsonl", rows)))["prompts"]
    assert verdict == "warning"
    assert text.startswith("512 or more prompts")
    assert "skips at most 600 of them and else ends" in text


def test_held_out_rows_that_were_read_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = json_lines(tmp_path / "a.jsonl", ROWS)
    whole = survey_dataset(data_set(path)).held_out
    monkeypatch.setattr(dataset_survey, "WHOLE_BYTES_MAX", 0)
    assert survey_dataset(data_set(path)).held_out == whole > 0


def test_a_mixture_evaluates_the_parts_that_hold_out_prompts(tmp_path: Path) -> None:
    one: Any = data_set(json_lines(tmp_path / "a.jsonl", ROWS), held_out_share=0.0)
    two: Any = data_set(json_lines(tmp_path / "b.jsonl", ROWS))
    mixture = mix([MixturePart("a", 1.0, one), MixturePart("b", 1.0, two)])
    assert mixture.unevaluated == ["a"]
    assert {prompt.task for prompt in mixture.held_out(10)} == {"b"}
    with pytest.raises(ConfigurationError, match="b, its share of 9999 prompts"):
        mixture.held_out(9999)
    alone = mix([MixturePart("a", 1.0, one)])
    with pytest.raises(ConfigurationError, match="no part holds out a prompt"):
        alone.held_out(1)


class Listing:
    name = "listing"

    def documents(self, seed: int, count: int) -> list[Any]:
        return [Document([1, 2], [3], "s")] * count  # pyright: ignore[reportArgumentType]


def test_held_out_rows_that_are_all_trained_on_are_refused() -> None:
    survey = DatasetSurvey("a", 20, True, 20, 0, 0, False, 10, [], [], "null", 0)
    facts = TaskFacts(surveys=[survey], held_out=0)
    c = Configuration.model_validate({"task": {"options": {"held_out": "test.jsonl"}}})
    fitted, _ = fit_data(c, facts, frozenset())
    assert fitted.evaluation.enabled
    found = {f.subject: f for f in task_findings(fitted, TaskAnswer(facts, [""]))}
    assert found["evaluation"].verdict == "refused"
    assert "held_out = 'test.jsonl': no prompt of it is left" in found["evaluation"].text
    plain = Configuration()
    assert not fit_data(plain, facts, frozenset())[0].evaluation.enabled


def test_documents_may_hold_lists() -> None:
    assert plain_documents(Listing(), 0, 2) == [Document((1, 2), (3,), "s")] * 2
    wrong = type("Wrong", (Listing,), {"documents": lambda self, seed, count: ["text"]})()
    with pytest.raises(ConfigurationError, match=r"documents\(\)\[0\] is no Document"):
        plain_documents(wrong, 0, 1)


def test_a_sum_that_rounds_below_one_is_right() -> None:
    reward = 0.7 + 0.2 + 0.1
    assert reward < 1
    answers = [JudgedAnswer(RewardVerdict(reward, {}), 1, prompt=0)] * 2
    assert measure(answers, answers).pass_at == {2: 1.0}
