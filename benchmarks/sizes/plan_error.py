"""How far `rollstream plan` is from the peak memory of real processes on this machine.

Four settings: a trainer and a rollout, each of two models made from a configuration, with other
micro-batches and slots. `trainer-62m` and `rollout-117m` were looked at when the constants of
`rollstream/run/sizes/arithmetic.py` were set; `trainer-117m` and `rollout-62m` were not. A case
compares the sum of the plan's lines and the memory of the same process before it has a model,
with the peak of anonymous and shared memory, sampled while it works.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case, alone
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import TrainerForm, total
from rollstream.run.sizes.shapes import ModelShape, shape_of

GOAL = 0.10
SAMPLE_S = 0.004
SMALL: dict[str, Any] = {
    "vocab_size": 16_384, "hidden_size": 640, "num_hidden_layers": 10, "intermediate_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 80,
    "tie_word_embeddings": True, "max_position_embeddings": 1024,
}  # fmt: skip
LARGE = SMALL | {
    "hidden_size": 896,
    "num_hidden_layers": 11,
    "intermediate_size": 2560,
    "head_dim": 112,
}


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """One process: its `kind` (`trainer`, `rollout`), its model and its sizes; `held_out` if the
    constants were set without it.
    """

    name: str
    kind: str
    spec: Mapping[str, Any]
    held_out: bool


SETTINGS = (
    MeasuredSetting(
        "trainer-62m", "trainer",
        {"model": SMALL, "tokens": 2048, "context": 512, "compute": "float32", "recompute": False},
        held_out=False,
    ),
    MeasuredSetting(
        "trainer-117m", "trainer",
        {"model": LARGE, "tokens": 1024, "context": 1024, "compute": "bfloat16", "recompute": True},
        held_out=True,
    ),
    MeasuredSetting(
        "rollout-117m", "rollout", {"model": LARGE, "slots": 16, "context": 512}, held_out=False
    ),
    MeasuredSetting(
        "rollout-62m", "rollout", {"model": SMALL, "slots": 48, "context": 768}, held_out=True
    ),
)  # fmt: skip


def cases(quick: bool) -> Iterator[Case]:
    """The largest relative error over the settings; `quick` measures the first of each kind."""
    errors: list[tuple[float, str]] = []
    for setting in SETTINGS[::2] if quick else SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            base, peak = measured(setting, Path(folder))
        planned = base + planned_bytes(setting)
        error = abs(planned - peak) / peak
        mark = ", held out" if setting.held_out else ""
        text = f"{setting.name} {planned / 1e6:.0f} of {peak / 1e6:.0f} MB{mark}"
        errors.append((error, text))
    worst = max(error for error, _ in errors)
    yield alone("plan_error", worst, "", at_most=GOAL, note="; ".join(text for _, text in errors))


def planned_bytes(setting: MeasuredSetting) -> float:
    """The plan's lines of a process on the CPU, where device and host memory are one."""
    shape, spec = shape_of_spec(setting.spec), setting.spec
    if setting.kind == "trainer":
        form = TrainerForm(
            micro_batch_tokens=spec["tokens"],
            compute=spec["compute"],
            recompute=spec["recompute"],
        )
        host = sums.trainer_host_lines(shape, form, sums.BFLOAT16, on_cpu=True)
        return total(sums.trainer_lines(shape, form)) + total(host)
    lines = sums.torch_engine_lines(
        shape, spec["slots"], spec["context"], sums.FLOAT32, sums.BFLOAT16
    )
    return total(lines)


def shape_of_spec(spec: Mapping[str, Any]) -> ModelShape:
    return shape_of({"model_type": "qwen3", **spec["model"]}, "measured")


def measured(setting: MeasuredSetting, folder: Path) -> tuple[float, float]:
    """Bytes of the process before it has a model, and at its peak."""
    file = folder / "spec.json"
    file.write_text(json.dumps(setting.spec))
    if setting.kind == "rollout":
        watch("versions", file)
    return watch(setting.kind, file)


def watch(kind: str, file: Path) -> tuple[float, float]:
    """Run a role and sample its memory until it ends."""
    line = [sys.executable, "-m", "benchmarks.sizes.role", kind, str(file)]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    base = peak = resident(process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(SAMPLE_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with {process.returncode}")
    return base, peak


def resident(process: int) -> float:
    """Bytes of anonymous and shared memory; 0 once the process has ended (Linux)."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    kept = [row.split() for row in text.splitlines() if row.startswith(("RssAnon", "RssShmem"))]
    return sum(float(row[1]) * 1024 for row in kept)
