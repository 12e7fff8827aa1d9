"""Data sets that people bring: forms of files, and rows that cannot be used."""

import gzip
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.text_tokenizer import CHAT_TEMPLATE, TextTokenizer
from rollstream.producers.tasks.dataset import Dataset, DatasetOptions
from rollstream.producers.tasks.text import TaskText
from testbed.first_hour.case import FirstHourCase

VERIFIER = f"{__name__}:verify"
ROWS = [{"prompt": f"What is {n}?", "reference": str(n)} for n in range(300)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
BOM = b"\xef\xbb\xbf"


def verify(answer: str, reference: object) -> float:
    """The verifier of these data sets."""
    return float(answer == reference)


def data_set(path: Path | str, text: TaskText | None = None, **options: Any) -> Dataset:
    """Returns the task over these files."""
    return Dataset(
        text or TaskText(TextTokenizer(None)), DatasetOptions(str(path), VERIFIER, **options)
    )


def skipped(task: Dataset) -> list[str]:
    """Returns the rows that the task skips, with their places."""
    task.read_rows()
    task.count_long_rows(Event())
    return [name for record in task.skipped_rows() for name in record.named]


HEALTHY: dict[str, tuple[Callable[[Path], str], dict[str, Any]]] = {}
"""How each form of a data set that is read is written, and its options."""


def reads(
    name: str, write: Callable[[Path], str], count: int = len(ROWS), **options: Any
) -> FirstHourCase:
    """Returns the case of a data set with `count` usable rows; `write` returns its path."""
    HEALTHY[name] = write, options

    def fault(folder: Path) -> str:
        task = data_set(write(folder), **options)
        names = skipped(task)
        rows = sum(record.rows for record in task.skipped_rows())
        if names or rows != count:
            return f"{rows} rows, of which {names} are skipped, in place of {count}"
        return "" if task.prompt(0, 0).tokens else "the first prompt is empty"

    return FirstHourCase(name, "forms of a data set", fault)


def refuses(
    name: str, write: Callable[[Path], str], words: Sequence[str], **options: Any
) -> FirstHourCase:
    """Returns the case of a data set that is refused in these words."""

    def fault(folder: Path) -> str:
        try:
            data_set(write(folder), **options).read_rows()
        except ConfigurationError as error:
            lacking = [word for word in words if word not in str(error)]
            return f"{lacking} not in {error}" if lacking else ""
        return "it is not refused"

    return FirstHourCase(name, "a data set that cannot be used is refused by name", fault)


def skips(
    name: str, bad: bytes, words: Sequence[str], text: TaskText | None = None, **options: Any
) -> FirstHourCase:
    """Returns the case of one bad line, the 151st of 301: it is skipped, in every order, and named
    with its file, its line and these words.
    """

    def fault(folder: Path) -> str:
        path = folder / "rows.jsonl"
        lines = LINES.splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:150], bad + b"\n", *lines[150:]]))
        early, late = data_set(path, text, **options), data_set(path, text, **options)
        names = skipped(early)
        if len(names) != 1 or any(w not in names[0] for w in ("rows.jsonl, line 151", *words)):
            return f"skipped: {names}"
        same = all(early.prompt(7, place) == late.prompt(7, place) for place in range(600))
        return "" if same else "the order depends on when the row is noticed"

    return FirstHourCase(name, "one bad row does not end a run", fault)


def _file(name: str, data: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return str(folder / name)

    return write


def _table(name: str, columns: Mapping[str, Any]) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        pq.write_table(pa.table({**columns}), folder / name)  # pyright: ignore[reportUnknownMemberType]
        return str(folder / name)

    return write


def _shards(pattern: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "data").mkdir()
        lines = LINES.splitlines(keepends=True)
        for shard in range(3):
            path = folder / "data" / f"part-{shard}.jsonl"
            path.write_bytes(b"".join(lines[100 * shard : 100 * shard + 100]))
        (folder / "data" / "README.md").write_text("about the data")
        (folder / "data" / "dataset_info.json").write_text('{"description": "of datasets"}')
        return str(folder / pattern)

    return write


def _at_home(folder: Path) -> str:
    (folder / "rows.jsonl").write_bytes(LINES)
    relative = os.path.relpath(folder / "rows.jsonl", Path.home())
    return f"~/{relative}"


PROMPTS = [row["prompt"] for row in ROWS]
REFERENCES = [row["reference"] for row in ROWS]
NANOSECONDS = pa.array(range(300), pa.timestamp("ns"))
CSV = "prompt,reference,note\n" + "".join(f'"What is {n}?",{n},"a, b\nc"\n' for n in range(300))
DEEP = b'{"prompt": "a", "reference": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def _parts_line(n: int) -> bytes:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": f"{n}?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "reference": str(n)}
    return json.dumps(row).encode() + b"\n"


FORMS = (
    reads("jsonl_with_a_byte_order_mark", _file("rows.jsonl", BOM + LINES)),
    reads(
        "jsonl_with_crlf_and_blank_lines", _file("rows.jsonl", LINES.replace(b"\n", b"\r\n\r\n"))
    ),
    reads("jsonl_gz", _file("rows.jsonl.gz", gzip.compress(LINES))),
    reads("jsonl_zst", _file("rows.jsonl.zst", zstandard.compress(LINES))),
    reads("zst_of_two_frames", _file("rows.jsonl.zst", zstandard.compress(LINES) * 2), 600),
    reads("gz_under_a_plain_name", _file("rows.jsonl", gzip.compress(LINES))),
    reads("jsonl_under_another_name", _file("rows.txt", LINES)),
    reads("ndjson", _file("rows.ndjson", LINES)),
    reads("json_list", _file("rows.json", json.dumps(ROWS, indent=1).encode())),
    reads("json_list_called_json_lines", _file("rows.jsonl", json.dumps(ROWS).encode())),
    reads("json_lines_called_json", _file("rows.json", LINES)),
    reads(
        "parquet_under_another_name",
        _table("rows.data", {"prompt": PROMPTS, "reference": REFERENCES}),
    ),
    reads("csv", _file("rows.csv", CSV.encode())),
    reads("csv_with_a_byte_order_mark", _file("rows.csv", BOM + CSV.encode())),
    reads(
        "csv_with_semicolons", _file("rows.csv", b"prompt;reference\na;1\nb;2\n" + b"c;3\n" * 298)
    ),
    reads("csv_with_tabs", _file("rows.csv", CSV.replace(",", "\t").encode())),
    reads("tsv_with_commas", _file("rows.tsv", CSV.encode())),
    reads(
        "csv_of_excel", _file("rows.csv", b"sep=;\r\nprompt;reference\r\n" + b"a, b;1\r\n" * 300)
    ),
    reads(
        "text_parts",
        _file("rows.jsonl", b"".join(_parts_line(n) for n in range(300))),
    ),
    reads("nothing_held_out", _file("rows.jsonl", LINES), held_out_share=0),
    reads("csv_gz", _file("rows.csv.gz", gzip.compress(CSV.encode()))),
    reads("tsv", _file("rows.tsv", b"prompt\treference\n" + b"What?\t1\n" * 300)),
    reads("folder_of_shards", _shards("data")),
    reads("pattern_of_shards", _shards("data/part-*.jsonl")),
    reads("home_folder", _at_home),
    reads(
        "unused_nanoseconds",
        _table("rows.parquet", {"prompt": PROMPTS, "reference": REFERENCES, "at": NANOSECONDS}),
    ),
    reads(
        "unused_bytes_that_are_no_text",
        _table(
            "rows.parquet",
            {
                "prompt": PROMPTS,
                "reference": REFERENCES,
                "raw": [b"\xff"] * 300,
                "steps": pa.array([[("a", 1)]] * 300, pa.map_(pa.string(), pa.int64())),
            },
        ),
    ),
    reads(
        "unused_column_that_is_odd_json",
        _file("rows.jsonl", LINES.replace(b'{"prompt"', b'{"x": 1e999, "y": NaN, "prompt"')),
    ),
    reads(
        "nested_columns",
        _table(
            "rows.parquet",
            {
                "prompt": PROMPTS,
                "model": [{"truth": str(n), "at": None} for n in range(300)],
            },
        ),
        reference="model.truth",
    ),
    reads(
        "column_with_a_dot",
        _file("rows.jsonl", LINES.replace(b'"reference"', b'"a.b"')),
        reference="a.b",
    ),
    reads("duplicate_rows", _file("rows.jsonl", LINES * 2), 600),
    reads(
        "chat_messages",
        _table(
            "rows.parquet",
            {
                "prompt": [[{"role": "user", "content": text}] for text in PROMPTS],
                "reference": REFERENCES,
            },
        ),
    ),
)


def _first_half(packed: bytes) -> bytes:
    return packed[: len(packed) // 2]


REFUSED = (
    refuses("empty_file", _file("rows.jsonl", b""), ["rows.jsonl is empty"]),
    refuses("file_of_a_byte_order_mark", _file("rows.jsonl", BOM), ["rows.jsonl is empty"]),
    refuses("header_alone", _file("rows.csv", b"prompt,reference\n"), ["rows.csv is empty"]),
    refuses("lfs_pointer", _file("rows.parquet", POINTER), ["rows.parquet is a Git LFS pointer"]),
    refuses(
        "lfs_pointer_of_lines", _file("rows.jsonl", POINTER), ["Git LFS pointer", "git lfs pull"]
    ),
    refuses("cut_gz", _file("rows.jsonl.gz", gzip.compress(LINES)[:-20]), ["cannot be read"]),
    refuses(
        "cut_zst", _file("rows.jsonl.zst", zstandard.compress(LINES)[:-20]), ["cannot be read"]
    ),
    refuses(  # whole blocks of it decompress, so that rows precede the cut
        "half_a_zst",
        _file("rows.jsonl.zst", _first_half(zstandard.compress(LINES * 60))),
        ["rows.jsonl.zst cannot be read"],
    ),
    refuses(
        "half_a_gz",
        _file("rows.jsonl.gz", _first_half(gzip.compress(LINES * 60))),
        ["cannot be read"],
    ),
    refuses("files_in_a_subfolder", _shards("."), ["data/*.jsonl"]),
    refuses("utf_16", _file("rows.jsonl", LINES.decode().encode("utf-16")), ["UTF-16", "UTF-8"]),
    refuses("spreadsheet", _file("rows.csv", b"PK\x03\x04rest"), ["a spreadsheet", "CSV"]),
    refuses(
        "one_object", _file("rows.json", b'{\n "data": []\n}'), ["one JSON object over several"]
    ),
    refuses(
        "trailing_comma",
        _file("rows.jsonl", b'{"prompt": "a", "reference": 1,}\n'),
        ["line 1: not JSON"],
    ),
    refuses("half_a_list", _file("rows.json", b'[\n{"prompt": "a"},\n'), ["rows.json is not JSON"]),
    refuses(
        "two_columns_of_one_name",
        _file("rows.csv", b"prompt,prompt,reference\na,b,1\n"),
        ["two columns 'prompt'"],
    ),
    refuses(
        "named_nanoseconds",
        _table("rows.parquet", {"prompt": PROMPTS, "reference": NANOSECONDS}),
        ["row 1", "reference is not a JSON value", "Timestamp", "cast it to string"],
    ),
    refuses(
        "dates_as_references",
        _table("rows.parquet", {"prompt": PROMPTS, "reference": [date(2024, 1, 1)] * 300}),
        ["300 of 300", "it holds a date", "likewise row 2, row 3, row 4, row 5 and 295 more"],
    ),
    refuses(
        "csv_in_latin_1",
        _file("rows.csv", "prompt,reference\ncafé,1\n".encode("latin-1")),
        ["line 2: prompt has a byte that is not UTF-8", "save the file as UTF-8"],
    ),
    refuses("no_such_folder", lambda folder: str(folder / "no" / "*.parquet"), ["no such file"]),
    refuses("folder_without_data", lambda folder: str(folder), ["no file of .jsonl"]),
    refuses(
        "two_bad_of_a_hundred",
        _file("rows.jsonl", b"".join(LINES.splitlines(True)[:98]) + b"x\ny\n"),
        ["2 of 100 rows", "line 99: not JSON", "line 100: not JSON"],
    ),
)

LONG_FRAME = CHAT_TEMPLATE.replace("{{ '<|begin|>' }}", "{{ '<|begin|>' + 'x' * 230 }}")
TWICE = CHAT_TEMPLATE.replace("(message['content'] or '')", "(message['content'] or '') * 2")


class TemplateTokenizer(TextTokenizer):
    """The built-in tokenizer with another chat template."""

    def __init__(self, template: str) -> None:
        super().__init__(None)
        self.whole.chat_template = template


def _text(template: str, limit: int) -> Callable[[], TaskText]:
    return lambda: TaskText(TemplateTokenizer(template), prompt_tokens_max=limit)


def _line(prompt: object, reference: object = "1") -> bytes:
    return json.dumps({"prompt": prompt, "reference": reference}).encode()


def _long(name: str, template: str, limit: int, prompt: object) -> FirstHourCase:
    """Returns the case of one row that is too long by its template alone."""
    return FirstHourCase(
        name,
        "a bound called sure that is not",
        lambda folder: (
            skips(name, _line(prompt), ["tokens are more than"], _text(template, limit)())
        ).fault(folder),
        is_slow=True,
    )


BAD_ROWS = (
    skips(
        "column_twice",
        b'{"prompt": "a", "prompt": "b", "reference": "1"}',
        ["has the column 'prompt' twice"],
    ),
    skips(
        "image_part",
        b'{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "reference": "1"}',
        ["not text but 'image_url'"],
    ),
    skips(
        "half_of_an_emoji_in_a_prompt", b'{"prompt": "a \\ud83d", "reference": "1"}', ["surrogate"]
    ),
    skips(
        "half_of_an_emoji_in_a_reference",
        b'{"prompt": "a", "reference": {"x": ["\\udc00"]}}',
        ["surrogate"],
    ),
    skips(
        "half_of_an_emoji_in_a_message",
        b'{"prompt": [{"role": "user", "content": "\\ud83d"}], "reference": 1}',
        ["surrogate"],
    ),
    skips(
        "half_of_an_emoji_in_an_answer",
        b'{"prompt": "a", "reference": "\\ud83d"}',
        ["surrogate"],
        reference="",
        answer="reference",
    ),
    skips(
        "bytes_that_are_no_utf_8", b'{"prompt": "caf\xe9", "reference": "1"}', ["not JSON", "utf-8"]
    ),
    skips("trailing_comma_in_one_row", b'{"prompt": "a", "reference": "1",}', ["not JSON"]),
    skips("no_object", b"[1, 2]", ["must be an object"]),
    skips(
        "lacking_column", b'{"prompt": "a", "refrence": "1"}', ["no column 'reference'", "refrence"]
    ),
    skips("empty_prompt", b'{"prompt": "", "reference": "1"}', ["prompt must be text"]),
    skips("nested_too_deep", DEEP, ["rows.jsonl"]),
    skips(
        "role_that_the_template_refuses",
        b'{"prompt": [{"role": "robot", "content": "a"}], "reference": 1}',
        ["role robot"],
        TaskText(TextTokenizer(None), prompt_tokens_max=90),
    ),
    skips(
        "answer_at_the_end",
        b'{"prompt": [{"role": "assistant", "content": "a"}], "reference": 1}',
        ["the assistant's"],
    ),
    _long("template_adds_231_tokens", LONG_FRAME, 280, "x" * 60),
    _long("template_says_all_twice", TWICE, 60, "x" * 40),
    _long(
        "long_system_message",
        LONG_FRAME,
        280,
        [{"role": "system", "content": "y" * 40}, {"role": "user", "content": "x" * 20}],
    ),
    _long("hundred_thousand_letters", CHAT_TEMPLATE, 60, "z" * 100_000),
)


CASES = (*FORMS, *REFUSED, *BAD_ROWS)
