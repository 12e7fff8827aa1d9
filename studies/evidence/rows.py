"""The committed archive of the evidence: one JSON row per run (`EvidenceRow`) with the facts about
each of its trajectories beside it (Parquet), below `RUNS`.

Everything that a case prints is computed from these files, so any reader can recount it without a
run. `recounted` checks a row against its facts.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

RUNS = Path(__file__).parent / "runs"
FORMAT = 1
BYTES_MAX = 40 << 20  # of all committed files together

LABEL = pa.dictionary(pa.int8(), pa.string())
FACTS = pa.schema(
    [
        ("group", pa.int32()), ("index", pa.int16()), ("wave", pa.int32()),
        ("prompt", pa.uint64()), ("fate", LABEL), ("finish", LABEL), ("tokens", pa.int32()),
        ("tokens_trained", pa.int32()), ("reward", pa.float32()), ("step", pa.int32()),
        ("version", pa.int32()), ("lag", pa.float32()),
    ]
)  # fmt: skip
"""Facts about an admitted trajectory; null where it never finished or was not trained. `prompt` is
a hash of its prompt, `version` that of its first token, `lag` the mean lag of its tokens when they
were consumed, in steps.
"""


class EvidenceRow(msgspec.Struct, frozen=True):
    """One run. `accuracy` is the mean reward of sampled answers to held-out prompts, under the
    version of `step`, the first behind `tokens_wanted` trained tokens; `tokens` are those behind
    it. `by_prompt` has (right answers, answers, mean reward) of each held-out prompt, and `prompts`
    a hash of these.

    `steps` has a metric of every step up to `step` in each list, `seconds` the time that these
    steps took: of a stepped run in CPU time. `facts` is the hash of the Parquet file. `machine`
    names what rounds differently elsewhere.
    """

    world: str
    arm: str
    seed: int
    settings: tuple[str, ...]
    tokens_wanted: int
    step: int
    tokens: int
    accuracy: float
    accuracy_greedy: float
    prompts: str
    by_prompt: tuple[tuple[int, int, float], ...]
    steps: dict[str, list[float | None]]
    state_hash: str
    facts: str
    seconds: float
    code_revision: str
    machine: dict[str, str]
    format: int = FORMAT

    @property
    def lag(self) -> float:
        """The mean lag of the trained tokens, in steps."""
        return self._mean("lag_consumed_mean")

    @property
    def ess(self) -> float:
        """The mean effective sample size of its steps, as a share."""
        return self._mean("ess")

    def _mean(self, metric: str) -> float:
        values = zip(self.steps.get(metric, ()), self.steps["tokens_trained"], strict=True)
        known = [(value, tokens) for value, tokens in values if value is not None and tokens]
        total = sum(tokens for _, tokens in known)
        return sum(value * tokens for value, tokens in known) / total if total else 0.0


def row_path(world: str, arm: str, seed: int, root: Path = RUNS) -> Path:
    """Returns the path of a run's row; its facts have the suffix `.parquet`."""
    return root / world / arm / f"seed-{seed}.json"


def write_row(row: EvidenceRow, facts: pa.Table, root: Path = RUNS) -> Path:
    """Write the facts, then the row, which names their hash: a row is there only with its facts.
    Raises `ValueError` if the archive would grow above `BYTES_MAX`.
    """
    path = row_path(row.world, row.arm, row.seed, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".parquet")
    pq.write_table(facts.cast(FACTS), beside, compression="zstd", compression_level=19)
    size = sum(one.stat().st_size for one in root.rglob("*") if one.is_file())
    if size > BYTES_MAX:
        beside.unlink()
        raise ValueError(f"{root} would have {size:,} bytes, above {BYTES_MAX:,}")
    row = msgspec.structs.replace(row, facts=file_hash(beside))
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(row) + b"\n")
    partial.replace(path)
    return path


def read_rows(root: Path = RUNS) -> Iterator[EvidenceRow]:
    """Yields the committed rows. Raises `ValueError` for a row of another format."""
    for path in sorted(root.glob("*/*/seed-*.json")):
        row = msgspec.json.decode(path.read_bytes(), type=EvidenceRow)
        if row.format != FORMAT:
            raise ValueError(f"{path} has format {row.format}; this release reads {FORMAT}")
        yield row


def read_facts(row: EvidenceRow, root: Path = RUNS) -> pa.Table:
    """Returns the facts of a row's trajectories."""
    return pq.read_table(row_path(row.world, row.arm, row.seed, root).with_suffix(".parquet"))


def file_hash(path: Path) -> str:
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def recounted(row: EvidenceRow, root: Path = RUNS) -> str:
    """Returns "" if the row agrees with its facts and with itself, else what differs."""
    path = row_path(row.world, row.arm, row.seed, root).with_suffix(".parquet")
    if not path.exists() or file_hash(path) != row.facts:
        return "its facts are missing or others"
    facts = read_facts(row, root)
    trained = zip(facts["step"].to_pylist(), facts["tokens_trained"].to_pylist(), strict=True)
    tokens = sum(count for step, count in trained if step is not None and step <= row.step)
    if tokens != row.tokens or tokens != sum(v or 0 for v in row.steps["tokens_trained"]):
        return f"{tokens} trained tokens in its facts, {row.tokens} in the row"
    mean = sum(reward for _, _, reward in row.by_prompt) / len(row.by_prompt)
    if abs(mean - row.accuracy) > 2e-6:  # both are rounded to six digits
        return f"accuracy {row.accuracy}, by its prompts {mean:.6f}"
    return ""


def by_seed(rows: Sequence[EvidenceRow], world: str, arm: str) -> Mapping[int, EvidenceRow]:
    """Returns the rows of one arm of one world, by seed."""
    return {row.seed: row for row in rows if (row.world, row.arm) == (world, arm)}
