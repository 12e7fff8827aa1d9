"""`false_refusals`: how many of 50 healthy runs `rollstream check` refuses, each with another pair
of a model's folder and a data set's form; the note names them.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.first_hour.brought_data import HEALTHY, VERIFIER
from testbed.first_hour.checked_runs import HEALTHY_MODELS, checked

RUNS = 50
RUN = """
run = "healthy"
[model]
path = "model"
[task]
name = "dataset"
[task.options]
"""


def cases(quick: bool) -> Iterator[Case]:
    """Yields the number; the quick form makes fewer runs."""
    forms, models = list(HEALTHY.items()), list(HEALTHY_MODELS.items())
    refused: list[str] = []
    count = 8 if quick else RUNS
    for number in range(count):
        form, (write, options) = forms[number % len(forms)]
        model, write_model = models[number % len(models)]
        if reason := _refusal(write, write_model, options):
            refused.append(f"{form} with {model}: {reason}")
    note = "; ".join([f"{count} runs", *refused])
    yield alone("false_refusals", float(len(refused)), "runs", at_most=0.0, note=note)


def _refusal(
    write: Callable[[Path], str],
    write_model: Callable[[Path], object],
    options: dict[str, object],
) -> str:
    with tempfile.TemporaryDirectory(prefix="rollstream-healthy-") as name:
        folder = Path(name)
        write_model(folder / "model")
        given = {"path": write(folder), "verifier": VERIFIER, **options}
        lines: Sequence[str] = [f"{key} = {json.dumps(value)}" for key, value in given.items()]
        (folder / "run.toml").write_text(RUN + "\n".join(lines) + "\n")
        answer = checked(folder)
    return "" if answer["code"] == 0 else str(answer["findings"])
