"""Maps the paths below `/api/` to answers, without HTTP, for server and static export alike.
docs/reference/explorer-api.md describes each route.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from rollstream.errors import ObjectMissing, RollstreamError, StoreError
from rollstream.look.explorer.answers import (
    comparison,
    groups,
    lanes,
    maps,
    overview,
    places,
    sheet,
    steps,
)
from rollstream.look.explorer.answers.questions import RunQuestions
from rollstream.look.explorer.answers.search import search
from rollstream.look.explorer.answers.trajectory import show_trajectory
from rollstream.look.explorer.answers.verdict import RunVerdict
from rollstream.look.explorer.answers.weights import StoredWeights, show_weights
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import WrongRequest
from rollstream.look.explorer.serving.sql import FreeSql
from rollstream.look.query.locate import RunLocation
from rollstream.streams.release import RELEASE

KEPT_BYTES = 16 << 20
# First words of routes whose answers depend on the index and the token scores alone: they stay
# until the index changes, up to `KEPT_BYTES`.
KEPT = frozenset({"steps", "groups", "map", "lanes", "trajectories", "compare",
                  "metrics", "learned"})  # fmt: skip

log = logging.getLogger(__name__)

Query = Mapping[str, str]
Publish = Callable[[str, Mapping[str, Any]], None]


class AnswerFailed(StoreError):
    """An answer could not be made of the records that it shows."""


class Explorer:
    """Answers the routes for the given runs, for any thread. `publish` receives the events of the
    runs. A context manager.
    """

    def __init__(
        self,
        locations: Sequence[RunLocation],
        publish: Publish,
        with_sql: bool = False,
        is_static: bool = False,
    ) -> None:
        self._opened = ExitStack()
        self._is_static = is_static
        self.runs = [
            self._opened.enter_context(ExploredRun(number, location, publish, time.time))
            for number, location in enumerate(locations)
        ]
        names = [run.name for run in self.runs]
        for run in self.runs:
            if names.count(run.name) > 1:
                run.name = f"{run.name} in {run.folder_name}"
        self._by_number = {run.number: run for run in self.runs}
        self._weights = {run.number: StoredWeights(run.location) for run in self.runs}
        self._sheets = {run.number: sheet.RunSheets(run) for run in self.runs}
        self._questions = {run.number: RunQuestions(run) for run in self.runs}
        self.verdicts = {run.number: _verdict(run, publish) for run in self.runs}
        self._sql: FreeSql | None = None
        if with_sql:
            self._sql = FreeSql({run.number: run.location for run in self.runs}, self._note)
            self._opened.callback(self._sql.close)
        self._kept: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def answer(self, path: str, query: Query) -> bytes:
        """Returns the JSON of a route; `path` is the part after `api/`. Raises `ObjectMissing` for
        a path that does not exist, `WrongRequest` for a wrong parameter, and other
        `RollstreamError` if the run cannot be read.
        """
        words = [unquote(word) for word in path.split("/")]
        key = canonical(path, query)
        state = sum(run.state_number for run in self.runs)
        is_kept = words[0] in KEPT or (words[0] == "r" and words[2:3] and words[2] in KEPT)
        if is_kept:
            with self._lock:
                cached = self._kept.get(key)
                if cached is not None and cached[0] == state:
                    self._kept.move_to_end(key)
                    return cached[1]
        try:
            data = msgspec.json.encode(self._found(words, query))
        except (RollstreamError, OSError):
            raise
        except Exception as error:
            # An odd record fails the answers that show it, and no others.
            log.warning("%s cannot be answered", path, exc_info=True)
            raise AnswerFailed(f"{type(error).__name__}: {error}") from error
        # One answer must not push out all others.
        if is_kept and len(data) < KEPT_BYTES // 4:
            self._keep(key, state, data)
        return data

    def watch(self) -> None:
        for run in self.runs:
            run.watch()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _note(self, number: str, text: str) -> None:
        self._by_number[number].records.notes.append(text)

    def _keep(self, key: str, state: int, data: bytes) -> None:
        with self._lock:
            before = self._kept.pop(key, None)
            self._kept_bytes += len(data) - (len(before[1]) if before else 0)
            self._kept[key] = (state, data)
            while self._kept_bytes > KEPT_BYTES:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._kept_bytes -= len(dropped)

    def _found(self, words: Sequence[str], query: Query) -> Any:
        match words:
            case ["runs"]:
                return {
                    "runs": [overview.run_line(run) for run in self.runs],
                    "sql": self._sql is not None,
                    "static": self._is_static,
                    "release": RELEASE,
                }
            case ["compare"]:
                return comparison.compare_runs(comparison.chosen_runs(self.runs, query))
            case ["compare", "sheet"]:
                return sheet.compared_sheet(comparison.chosen_runs(self.runs, query))
            case ["compare", "steps", step]:
                chosen = comparison.chosen_runs(self.runs, query)
                return comparison.compare_step(chosen, _whole(step))
            case ["views"] if self._sql is not None:
                return {"views": self._sql.views()}
            case ["r", number, *rest] if number in self._by_number:
                return self._of_run(self._by_number[number], rest, query)
            case _:
                raise ObjectMissing("there is no such route or run")

    def _of_run(self, run: ExploredRun, words: Sequence[str], query: Query) -> Any:
        match words:
            case ["sheet"]:
                return self._sheets[run.number].show(query)
            case ["learned"]:
                return sheet.show_learned(run)
            case ["metrics", name]:
                return sheet.show_metric(run, name)
            case ["settings"]:
                return overview.show_settings(run)
            case ["steps"]:
                return steps.list_steps(run, query)
            case ["steps", step]:
                return steps.show_step(run, _whole(step))
            case ["groups"]:
                return groups.list_groups(run, query)
            case ["groups", group]:
                return groups.show_group(run, _whole(group))
            case ["trajectories", name]:
                return show_trajectory(run, name, query)
            case ["lanes"]:
                return lanes.show_lanes(run, query)
            case ["map", kind]:
                return maps.show_map(run, kind, query)
            case ["search"]:
                return search(run, query)
            case _:
                return self._of_store(run, words, query)

    def _of_store(self, run: ExploredRun, words: Sequence[str], query: Query) -> Any:
        match words:
            case ["questions"]:
                return self._questions[run.number].show()
            case ["weights"]:
                return show_weights(run, self._weights[run.number])
            case ["audit"]:
                return self.verdicts[run.number].show()
            case ["records", topic, partition, offset]:
                return places.show_record(run, topic, _whole(partition), _whole(offset))
            case ["sql"] if self._sql is not None:
                sql = query.get("q", "")
                return self._sql.answer(run.number, sql) if sql else _no_query()
            case _:
                raise ObjectMissing("there is no such route")


def canonical(path: str, query: Query) -> str:
    """Returns the key of an answer in the static export: parameters sorted by name, empty ones left
    out.
    """
    pairs = [f"{name}={_encoded(value)}" for name, value in sorted(query.items()) if value != ""]
    return f"{path}?{'&'.join(pairs)}" if pairs else path


def _encoded(value: str) -> str:
    # As JavaScript's `encodeURIComponent`.
    return quote(value, safe="-_.!~*'()")


def _verdict(run: ExploredRun, publish: Publish) -> RunVerdict:
    return RunVerdict(run, lambda: publish("audit", {"run": run.number, "state": "done"}))


def _whole(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise ObjectMissing(f"{word[:40]!r} is not a number of this run")
    return number


def _no_query() -> Any:
    raise WrongRequest("q is missing: write one SQL query")
