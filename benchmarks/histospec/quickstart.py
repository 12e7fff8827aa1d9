"""`histospec_quickstart`: cost of drafts where no prompt comes twice. Whole runs of the quickstart
with its default, which drafts from siblings at most, are compared with `rollouts.drafts = "off"`.

Pairs start from one warm model, each with another seed, in alternating order; the value is trained
tokens per second of all processes together on this machine.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, paired
from benchmarks.runs.measured import run
from benchmarks.runs.quickstart import QUICKSTART, warm_model


def quickstart(pairs: int) -> Iterator[Case]:
    """Yields `histospec_quickstart`."""
    speeds: dict[str, list[float]] = {"auto": [], "off": []}
    with tempfile.TemporaryDirectory(prefix="rollstream-drafts-") as scratch:
        base = Path(scratch)
        given = [f"model.path={warm_model(base)}", "evaluation.enabled=false"]
        for pair in range(pairs):
            for drafts in sorted(speeds, reverse=bool(pair % 2)):
                overrides = [*given, f"seed={pair}", f"rollouts.drafts={drafts}"]
                measured = run(QUICKSTART, base / f"{drafts}-{pair}", overrides)
                speeds[drafts].append(measured.tokens_per_s)
    note = "no prompt comes twice; siblings do"
    yield paired(
        "histospec_quickstart", speeds["auto"], "token/s", "drafts off", speeds["off"], 0.97, note
    )
