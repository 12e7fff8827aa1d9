"""Counts a run again without the product's code: raw SQLite rows, Kafka records and Parquet
columns, decoded by docs/reference/wire-format.md and docs/reference/archive.md alone. `rollstream
audit` must agree.

`python -m testbed.recount RUN` prints one JSON object; RUN is a run's folder, a folder with an
archive, `sqlite:FOLDER` or `kafka://HOST:PORT/PREFIX`. Content hashes are not recomputed (the
standard library has no XXH3): trajectories are identified by name and position.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from testbed.recount_rows import Places, Row, rows


@dataclass
class Fence:
    """The records of a single-holder topic that count; per partition."""

    fences: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    void: int = 0
    gaps: int = 0

    def live(self, row: Row) -> bool:
        if row.term is None or row.sequence is None:
            return False
        term, expected = self.fences.get(row.partition, (0, 0))
        behind = row.term == term and row.sequence < expected
        if row.term < term or behind:
            self.void += 1
            return False
        unopened = row.term > term and term and row.schema != "opened/1"
        self.gaps += bool(unopened) or (row.term == term and row.sequence > expected)
        self.fences[row.partition] = (row.term, row.sequence + 1)
        return True


def recount(places: Places) -> dict[str, Any]:
    """Groups by how they ended, trajectories and tokens, and duplicates."""
    fence = Fence()
    admitted = {
        row.fields["group"]
        for row in rows(places, "admissions")
        if fence.live(row) and row.schema == "admitted/1"
    }
    void, gaps = fence.void, fence.gaps
    ended: Counter[str] = Counter()
    groups: Counter[int] = Counter()
    trained: Counter[str] = Counter()
    step_of: dict[str, int] = {}
    place_of: dict[str, tuple[int, int]] = {}
    versions: dict[int, dict[str, int]] = {}
    fence = Fence()
    for row in rows(places, "ledger"):
        if not fence.live(row):
            continue
        if row.schema == "take/1":
            for group in row.fields["groups"]:
                ended["trained"] += 1
                groups[group["group"]] += 1
            for member in row.fields["members"]:
                name, at = member["trajectory"], member["at"]
                trained[name] += 1
                step_of.setdefault(name, row.fields["step"])
                place_of.setdefault(name, (at["partition"], at["offset"]))
        elif row.schema == "group_closed/1":
            ended[reason_of(row)] += 1
            groups[row.fields["group"]] += 1
        elif row.schema == "step_done/1":
            versions.setdefault(row.fields["step"], row.fields["version"])
    tokens = count_tokens(places, step_of, place_of, versions)
    return {
        "groups": {
            "admitted": len(admitted),
            **{name: ended[name] for name in ("trained", "filtered", "expired", "dead")},
            "open": len(admitted - groups.keys()),
            "ended_twice": sum(count > 1 for count in groups.values()),
            "never_admitted": len(groups.keys() - admitted),
        },
        "steps": len(versions),
        "trajectories": {
            "trained": sum(trained.values()),
            "trained_twice": sum(count > 1 for count in trained.values()),
            **tokens.pop("trajectories"),
        },
        "tokens": tokens,
        "void": void + fence.void,
        "gaps": gaps + fence.gaps,
    }


def reason_of(row: Row) -> str:
    """The archive's own `reason` column takes the name; a record's field is `reason_` there."""
    return str(row.fields.get("reason_") or row.fields["reason"])


def count_tokens(
    places: Places,
    step_of: dict[str, int],
    place_of: dict[str, tuple[int, int]],
    versions: dict[int, dict[str, int]],
) -> dict[str, Any]:
    """Completions, and the tokens of those named by takes, above and within `max_lag`."""
    seen: Counter[str] = Counter()
    trained = masked = generated = elsewhere = 0
    for row in rows(places, "trajectories"):
        if row.schema != "trajectory/1":
            continue
        fields = row.fields
        name = fields["trajectory"]
        seen[name] += 1
        generated += int(np.count_nonzero(np.asarray(fields["sources"]) == 1))
        if name not in step_of or seen[name] > 1:
            continue
        elsewhere += place_of[name] != (row.partition, row.offset)
        left = untrained(fields)
        for span in fields["spans"]:
            at, version = range(span["start"], span["end"]), span["version"]
            size = sum(token not in left for token in at)
            lag = step_of[name] - 1 - version["number"]
            made = versions.get(version["number"]) or version
            within = places.max_lag is None or lag <= places.max_lag
            if within and made["term"] == version["term"]:
                trained += size
            else:
                masked += size
    found = {
        "completed": len(seen),
        "duplicates": sum(seen.values()) - len(seen),
        "not_the_first": elsewhere,
        "not_found": len(step_of.keys() - seen.keys()),
    }
    return {"trajectories": found, "trained": trained, "masked": masked, "generated": generated}


def untrained(fields: dict[str, Any]) -> set[int]:
    """The generated tokens, counted among these alone, of turns that the program abandoned."""
    found: set[int] = set()
    before = 0
    for number, turn in enumerate(fields.get("turns") or ()):
        count = turn["end"] - turn["generated"]
        if number in (fields.get("abandoned") or ()):
            found.update(range(before, before + count))
        before += count
    return found


def places_of(named: str) -> Places:
    """A name as a person types it."""
    if named.startswith("kafka://"):
        return Places(kafka=named)
    if named.startswith("sqlite:"):
        return Places(sqlite=Path(named.removeprefix("sqlite:")))
    folder = Path(named)
    if not (folder / "config.json").exists():
        store = folder / "store" if (folder / "store").is_dir() else folder
        return Places(store=store, run=only_run(store))
    settings = json.loads((folder / "config.json").read_text())
    bus, store = settings["bus"], settings["store"]
    log = folder / bus.removeprefix("sqlite:")
    return Places(
        log if bus.startswith("sqlite:") and log.is_dir() else None,
        bus if bus.startswith("kafka:") else "",
        folder / store.removeprefix("file:") if store.startswith("file:") else None,
        settings["run"],
        settings["dispatch"]["max_lag"],
    )


def only_run(store: Path) -> str:
    (run,) = {path.name for path in store.glob("archive/topic=*/run=*")}
    return run.removeprefix("run=")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", metavar="RUN", help="a run's folder, an archive, or a bus URL")
    parser.add_argument("--max-lag", type=int, help="where no config.json says it")
    words = parser.parse_args()
    counted = places_of(words.run)
    if words.max_lag is not None:
        counted.max_lag = words.max_lag
    print(json.dumps(recount(counted), indent=1))
