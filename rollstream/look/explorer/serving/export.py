"""Writes runs as static files for any file host: the page, every answer that its views ask for, and
one row per trajectory for searches in the browser.

An answer is a row of `responses.parquet`, found by its canonical URL: rows are sorted and row
groups small, so a browser reads one by a range request.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.look.explorer.answers import lanes
from rollstream.look.explorer.answers.overview import span_of
from rollstream.look.explorer.answers.rows import select_rows
from rollstream.look.explorer.assets import INDEX, PAGE, SOURCE_META, TYPES
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import WrongRequest
from rollstream.look.explorer.serving.routes import AnswerFailed, Explorer, canonical
from rollstream.look.query.locate import RunLocation
from rollstream.streams.records import GENERATED, PROMPT

FORMAT = 1
ROW_GROUP, TABLE_GROUP = 128, 2048
READY_S = 3600.0  # to read the whole run
AUDIT_S = 3600.0
# An export has one answer of some kilobytes per trajectory.
TRAJECTORIES_MAX = 200_000
# Offsets whose tokens are read together.
TEXT_ROWS = 1024

# Answers of a run that take no parameters.
VIEWS = ("settings", "sheet", "learned", "questions", "weights", "audit", "map/lag",
         "map/length")  # fmt: skip
SAFE = "-_.!~*'()"  # as in JavaScript's encodeURIComponent

Tell = Callable[[str], None]
_NUMBERS = ("index", "rollout_term", "tokens", "version", "version_last", "trainer_version", "lag",
            "lag_consumed", "step", "wave", "moves", "guessed", "accepted", "attempt")  # fmt: skip
# The table of trajectories: the fields of a ROW, and the texts of prompt and answer.
ROW_SCHEMA = pa.schema(
    [("trajectory", pa.string()), ("group", pa.int64())]
    + [(name, pa.string()) for name in ("task", "rollout", "finish", "reason")]
    + [(name, pa.float64()) for name in ("reward", "group_reward", "started_s", "finished_s")]
    + [(name, pa.int32()) for name in _NUMBERS]
    + [("answer", pa.string()), ("prompt", pa.string())]
)


@dataclass(frozen=True, slots=True)
class ExportKey:
    path: str
    given: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The answer's canonical URL."""
        return canonical(self.path, dict(self.given))


def export(locations: Sequence[RunLocation], folder: Path, tell: Tell) -> Path:
    """Write the export into a new or empty folder, or over an earlier export. Raises
    `ConfigurationError` if the folder holds anything else, or if a run is too large.
    """
    data = _prepare(folder)
    with Explorer(locations, lambda event, line: None, is_static=True) as explorer:
        for run in explorer.runs:
            _wait(run)
        tell("writing answers")
        rows = _write_answers(explorer, data / "responses.parquet")
        tables: dict[str, str] = {}
        for run in explorer.runs:
            tell(f"writing the trajectories of {run.name}")
            tables[run.number] = f"r{run.number}-trajectories.parquet"
            _write_trajectories(run, data / tables[run.number])
    line = {
        "format": FORMAT, "runs": "responses.parquet", "rows": rows, "trajectories": tables,
        "created_s": time.time(),
    }  # fmt: skip
    (data / "static.json").write_text(json.dumps(line))
    return folder / INDEX


def _prepare(folder: Path) -> Path:
    data = folder / "data"
    if folder.exists() and any(folder.iterdir()) and not (data / "static.json").is_file():
        raise ConfigurationError(f"{folder} is not empty and holds no export: choose a new folder")
    shutil.rmtree(folder / "page", ignore_errors=True)
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    for path in sorted(PAGE.rglob("*")):
        inside = path.relative_to(PAGE)
        if path.is_file() and path.suffix in TYPES and inside.as_posix() != INDEX:
            target = folder / "page" / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    page = (PAGE / INDEX).read_text(encoding="utf-8")
    if SOURCE_META not in page:
        raise ConfigurationError(f"{PAGE / INDEX} lacks {SOURCE_META}; install the release again")
    static = page.replace(SOURCE_META, SOURCE_META.replace("server", "static"))
    (folder / INDEX).write_text(static, encoding="utf-8")
    return data


def _wait(run: ExploredRun) -> None:
    until_s = time.monotonic() + READY_S
    while not run.index.progress.complete:
        if run.trouble:
            raise ConfigurationError(f"{run.location.name} cannot be read: {run.trouble}")
        if time.monotonic() > until_s:
            raise ConfigurationError(f"{run.location.name} was not read within {READY_S:g} s")
        run.watch()
        time.sleep(0.05)
    count = run.index.value("SELECT count(*) FROM t")
    if count > TRAJECTORIES_MAX:
        raise ConfigurationError(
            f"{run.location.name} has {count:,} trajectories, and an export at most "
            f"{TRAJECTORIES_MAX:,}: serve it with rollstream explore"
        )


def _write_answers(explorer: Explorer, path: Path) -> int:
    # Answers are computed one row group at a time, so memory holds one row group.
    keys = sorted(set(_keys(explorer)), key=lambda key: key.name.encode())
    schema = pa.schema([("key", pa.string()), ("body", pa.string())])
    count = 0
    options: dict[str, Any] = {
        "compression": "zstd", "use_dictionary": False, "write_statistics": ["key"],
    }  # fmt: skip
    with pq.ParquetWriter(path, schema, **options) as writer:
        rest = iter(keys)
        while some := list(islice(rest, ROW_GROUP)):
            rows = [(key.name, body) for key in some if (body := _body(explorer, key))]
            if rows:
                columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
                table = pa.Table.from_arrays(columns, schema=schema)
                writer.write_table(table, row_group_size=ROW_GROUP)
                count += len(rows)
    return count


def _body(explorer: Explorer, key: ExportKey) -> str:
    try:
        return explorer.answer(key.path, dict(key.given)).decode()
    except (ObjectMissing, WrongRequest, AnswerFailed):
        # The run lacks it, or an odd record makes it impossible.
        return ""


def _keys(explorer: Explorer) -> Iterator[ExportKey]:
    yield ExportKey("runs")
    for run in explorer.runs:
        explorer.verdicts[run.number].wait(AUDIT_S)
        yield from _keys_of(explorer, run)
    if len(explorer.runs) > 1:
        numbers = ",".join(run.number for run in explorer.runs)
        first = explorer.runs[0].index
        steps = first.columns("SELECT DISTINCT step FROM done ORDER BY step")["step"]
        for pair in permutations((run.number for run in explorer.runs), 2):
            yield ExportKey("compare/sheet", (("runs", ",".join(pair)),))
        for parameters in ((), (("runs", numbers),)):
            yield ExportKey("compare", parameters)
            yield ExportKey("compare/sheet", parameters)
            yield from (ExportKey(f"compare/steps/{step}", parameters) for step in steps)


def _keys_of(explorer: Explorer, run: ExploredRun) -> Iterator[ExportKey]:
    base = f"r/{run.number}"
    for name in VIEWS:
        yield ExportKey(f"{base}/{name}")
    for metric in msgspec.json.decode(explorer.answer(f"{base}/sheet", {}))["metrics"]:
        yield ExportKey(f"{base}/metrics/{quote(metric, safe=SAFE)}")
    for name in ("steps", "groups"):
        yield from _pages(explorer, f"{base}/{name}")
    names = {
        "steps": "SELECT DISTINCT step AS name FROM done UNION SELECT step FROM takes",
        "groups": 'SELECT "group" AS name FROM admitted UNION SELECT "group" FROM t',
        "trajectories": "SELECT trajectory AS name FROM t UNION SELECT unnest(names) FROM admitted",
    }
    for route, sql in names.items():
        for name in run.index.columns(sql)["name"]:
            yield ExportKey(f"{base}/{route}/{quote(str(name), safe=SAFE)}")
    for p, o in (
        run.index.cursor()
        .execute("SELECT p, o FROM takes UNION SELECT p, o FROM done UNION SELECT p, o FROM ends")
        .fetchall()
    ):
        yield ExportKey(f"{base}/records/ledger/{p}/{o}")
    yield from _offenders(explorer, base)
    yield from _tiles(run, base)


def _pages(explorer: Explorer, path: str) -> Iterator[ExportKey]:
    parameters: tuple[tuple[str, str], ...] = ()
    while True:
        key = ExportKey(path, parameters)
        yield key
        after = msgspec.json.decode(explorer.answer(path, dict(parameters)))["next"]
        if after is None:
            return
        parameters = (("cursor", str(after)),)


def _offenders(explorer: Explorer, base: str) -> Iterator[ExportKey]:
    verdict = msgspec.json.decode(explorer.answer(f"{base}/audit", {}))
    for invariant in verdict.get("invariants", ()):
        for offender in invariant["offenders"]:
            if "offset" in offender:
                place = f"{offender['topic']}/{offender['partition']}/{offender['offset']}"
                yield ExportKey(f"{base}/records/{place}")


def _tiles(run: ExploredRun, base: str) -> Iterator[ExportKey]:
    span = span_of(run)
    if span is None:
        return
    # From the level that shows the whole span in two tiles down to the first at which every tile
    # has its trajectories one by one.
    z = max(lanes.LEVEL_MIN, math.ceil(math.log2(max(span[1] - span[0], 0.1))))
    tiles: set[int] = {math.floor(span[0] / 2.0**z), math.floor(span[1] / 2.0**z)}
    while tiles and z >= lanes.LEVEL_MIN:
        for tile in sorted(tiles):
            yield ExportKey(f"{base}/lanes", (("i", str(tile)), ("z", str(z))))
        crowded = [tile for tile in tiles if lanes.is_crowded(run, z, tile)]
        z -= 1
        tiles = {child for tile in crowded for child in (2 * tile, 2 * tile + 1)}


def _write_trajectories(run: ExploredRun, path: Path) -> None:
    writer: pq.ParquetWriter | None = None
    try:
        for rows in _rows_with_texts(run):
            table = pa.Table.from_pylist(rows, schema=ROW_SCHEMA)
            writer = writer or pq.ParquetWriter(path, ROW_SCHEMA, compression="zstd")
            writer.write_table(table, row_group_size=TABLE_GROUP)
        if writer is None:
            pq.write_table(ROW_SCHEMA.empty_table(), path)
    finally:
        if writer is not None:
            writer.close()


def _rows_with_texts(run: ExploredRun) -> Iterator[list[dict[str, Any]]]:
    ends = run.index.rows("SELECT p, min(o) AS low, max(o) AS high FROM t GROUP BY p ORDER BY p")
    for end in ends:
        for start in range(end["low"], end["high"] + 1, TEXT_ROWS):
            stop = min(start + TEXT_ROWS, end["high"] + 1)
            rows = select_rows(
                run, "FROM t WHERE p = ? AND o >= ? AND o < ? ORDER BY o", [end["p"], start, stop]
            )
            tokens = {
                completion.offset: completion
                for completion in run.records.tokens(end["p"], start, stop)
            }
            for row in rows:
                completion = tokens.get(row.pop("at")["offset"])
                for name, source in (("answer", GENERATED), ("prompt", PROMPT)):
                    tokens_of = (
                        None
                        if completion is None
                        else completion.tokens[completion.sources == source]
                    )
                    row[name] = "" if tokens_of is None else run.text.text(tokens_of.tolist())
            yield rows
