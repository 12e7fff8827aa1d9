"""The piece `run`: a real `rollstream run` with trainer and vLLM on the same card, then bare vLLM
alone on the card with the prompts and lengths of that run; the metrics are from the run's log.
"""

import json
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from rollstream.producers.engines.vllm.local.environment import installed_release
from rollstream.run.sizes.devices import accelerator_named
from studies.gpu_check.read import Seen, seen
from studies.gpu_check.setup import Size, configuration, make_model
from testbed.run_driver import RunDriver

STOP_S, BARE_S = 60.0, 150.0
BARE_TOKENS = 400_000
"""Upper bound of tokens that bare vLLM generates: 20 s at 20 000 tokens/s."""


@dataclass(frozen=True, slots=True)
class Check:
    """The device, model and settings of a check."""

    size: Size
    model: Path
    folder: Path
    share: float
    is_random: bool


def measure(size: Size, model: Path | None, share: float) -> list[str]:
    """The lines of the run and of bare vLLM. Raises `RuntimeError` if nothing was generated, or if
    one of them failed.
    """
    with tempfile.TemporaryDirectory(prefix="rollstream-gpu-check-") as temporary:
        folder = Path(temporary)
        path = model or make_model(size.shape, folder / "model")
        check = Check(size, path.resolve(), folder, share, model is None)
        trouble = _run(check)
        found = seen(folder / "run") if (folder / "run" / "config.json").exists() else None
        if found is None or not found.answers:
            raise RuntimeError(f"nothing was generated: {trouble or 'the run gives no reason'}")
        bare, why = _bare(check, found)
        lines = report(check, found, bare)
    if trouble or why:
        raise RuntimeError("\n".join([*lines, trouble, why]))
    return lines


def _run(check: Check) -> str:
    """Runs until the end or the time limit; returns the error, "" for none."""
    toml, size = check.folder / "check.toml", check.size
    written = configuration(size, check.model, check.folder, check.share, is_random=check.is_random)
    toml.write_text(written, encoding="utf-8")
    with RunDriver(check.folder / "run", toml) as run:
        supervisor, code = run.start(), None
        with suppress(subprocess.TimeoutExpired):
            code = supervisor.wait(None, size.limit_s)
        if code is None:
            with suppress(subprocess.TimeoutExpired):
                code = supervisor.stop(signal.SIGINT, STOP_S)
    return "" if code in (0, None, 130) else supervisor.describe()


def _bare(check: Check, found: Seen) -> tuple[float | None, str]:
    """Tokens per second of bare vLLM, and the reason if there are none."""
    requests: list[dict[str, object]] = []
    left = BARE_TOKENS
    for one in found.answers:
        left -= len(one.logprobs)
        if left > 0:
            prompt = one.tokens[: len(one.tokens) - len(one.logprobs)].tolist()
            requests.append({"prompt": prompt, "length": len(one.logprobs)})
    size = check.size
    asked = {"model": str(check.model), "share": check.share, "requests": requests}
    file = check.folder / "bare.json"
    file.write_text(json.dumps(asked | {"slots": size.slots, "context": size.context}))
    line = [sys.executable, "-m", "studies.gpu_check.bare", str(file)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=BARE_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"bare vLLM took longer than {BARE_S:g} s"
    if done.returncode:
        return None, f"bare vLLM ended with {done.returncode}:\n{done.stderr[-2000:]}"
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]), ""


def report(check: Check, found: Seen, bare: float | None) -> list[str]:
    """Prints the metrics, one a line; an unknown one is marked as such."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU (dry run)"
    which = "random weights" if check.is_random else check.model.name
    lines = [
        f"model         {which}; vLLM {installed_release()} has {check.share:g} of the card, the "
        "trainer shares it",
        f"steps         {len(found.steps)} of {check.size.steps}",
        f"bare vLLM     {_per_s(bare)}",
        f"rollout       {_per_s(found.alone, bare)} before the trainer's first micro-batch",
        f"              {_per_s(found.beside, bare)} beside the trainer",
        f"trainer       {_per_s(found.trained_per_s())}; {_mfu(check.model, found, card)}",
    ]
    pause = found.pause()
    printed = (
        "no update" if pause is None else f"{pause[0] * 1e3:.0f} ms (longest {pause[1] * 1e3:.0f})"
    )
    lines.append(f"update pause  {printed}, {len(found.pauses_s)} versions taken")
    gap = found.mismatch()
    printed = "no token of lag 0" if gap is None else f"KL {gap[0]:.2e}, mean {gap[1]:.2e} nats"
    lines.append(f"mismatch      {printed}" + ("" if gap is None else f" ({gap[2]:.0f} tokens)"))
    if not check.is_random:
        rewards = " ".join(f"{one.metrics.get('reward_mean', 0.0):.2f}" for one in found.steps)
        lines.append(f"reward        {rewards}")
    return lines


def _per_s(rate: float | None, bare: float | None = None) -> str:
    if rate is None:
        return "unknown"
    return f"{rate:,.0f} tokens/s" + (f" ({rate / bare:.2f} of bare vLLM)" if bare else "")


def _mfu(model: Path, found: Seen, card: str) -> str:
    rate, known = found.trained_per_s(), accelerator_named(card)
    if rate is None or known is None:
        return "MFU unknown" + (
            "" if known else " (the card's peak is not in rollstream/run/sizes/devices.py)"
        )
    flops, peak = 6 * parameters(model) * rate, known.flops
    return (
        f"MFU {flops / peak:.3f} (6·N·tokens/s = {flops / 1e12:.1f} of {peak / 1e12:.0f} TFLOP/s)"
    )


def parameters(model: Path) -> int:
    """Returns the number of elements in the checkpoint's tensors."""
    from safetensors import safe_open

    total = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:  # pyright: ignore[reportUnknownVariableType]
            for name in tensors.keys():  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # noqa: SIM118  it is no mapping
                total += int(torch.Size(tensors.get_slice(name).get_shape()).numel())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return total
