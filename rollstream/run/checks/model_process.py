"""Builds a run's model without memory for its weights, and refuses one that no role could use:
`python -m rollstream.run.checks.model_process ORDER`, because the import of transformers takes
seconds.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.import_path import module_command, module_environment
from rollstream.producers.engines.kind import engine_kind
from rollstream.producers.rewards.worker import ended_reason
from rollstream.run.checks.findings import Finding
from rollstream.run.checks.process_time import ProcessTime, output_file
from rollstream.run.config.settings import Configuration
from rollstream.storage.settings import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Longest time of the process, and the time between two looks at it.
MODEL_S, LOOK_S = 30.0, 0.05


class ModelOrder(msgspec.Struct, frozen=True):
    folder: str
    engine: str
    is_adapted: bool
    lora: dict[str, Any] = {}  # msgspec copies empty defaults


class ModelProcess:
    """Runs from its construction; the caller may do other work before `findings`."""

    def __init__(self, c: Configuration, folder: Path) -> None:
        order = ModelOrder(
            str(folder.absolute()),
            c.rollouts.engine,
            c.model.lora.rank > 0,
            c.model.lora.model_dump(),
        )
        self._output = output_file()
        self._child = subprocess.Popen(
            module_command(__name__, msgspec.json.encode(order).decode()),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **module_environment()},
        )

    def findings(self, context_max: int) -> list[Finding]:
        """Waits a bounded time for the check at `context_max` tokens, and ends the process."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._child.stdin as pipe:
            pipe.write(b"%d\n" % context_max)
        clock = ProcessTime(self._child.pid)
        try:
            while True:
                try:
                    self._child.wait(LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if clock.is_over(MODEL_S):
                        late = f"the model was not built within {MODEL_S:g} s"
                        return [Finding("model", "warning", late)]
            self._output.seek(0)
            text = self._output.read().decode(errors="replace").rpartition("\n")[2]
            if text:
                return [Finding("model", "refused", json.loads(text))]
            # A process that fails refuses nothing: the roles name the fault.
            if self._child.returncode:
                ended = f"the model could not be built for this check: {ended_reason(self._child)}"
                return [Finding("model", "warning", ended)]
            return []
        finally:
            self._child.kill()
            self._child.wait()
            self._output.close()


def refusal(order: ModelOrder, context_max: Callable[[], int]) -> str:
    """Returns why no role can use the model at `context_max` tokens, which are read once the model
    is built; "" if nothing is known against it.
    """
    import transformers

    from rollstream.storage.model_folder.hf_weights import read_weight_files
    from rollstream.storage.model_folder.model_fit import check_finite, check_fit, check_forward

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # pyright: ignore[reportUnknownMemberType]
    folder = Path(order.folder)
    try:
        model = check_fit(folder)
        check_forward(model, folder)
        engine_kind(order.engine).check_model(model, context_max(), order.is_adapted)
        check_finite(read_weight_files(folder))
        if order.is_adapted and order.lora:
            _check_adapter(model, LoraSettings(**order.lora))
    except EngineRefused as error:
        return (
            f"model.path: engine {order.engine!r} cannot serve {folder}: {error}; choose another "
            "model (model.path) or another engine (rollouts.engine)"
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def _check_adapter(model: "PreTrainedModel", lora: LoraSettings) -> None:
    import torch

    from rollstream.storage.model_folder.lora import attach_adapters

    start = None if lora.path is None else Path(lora.path).expanduser()
    # The run's store has it.
    if start is not None and not start.exists():
        start = None
    try:
        # As the model: the factors of a large one take gigabytes.
        with torch.device("meta"):
            attach_adapters(model, lora, 0, torch.float32, "", start)
    except ConfigurationError as error:
        if start is None:
            raise
        raise ConfigurationError(f"model.lora.path = {lora.path!r}: {error}") from error


def main(order: str) -> None:
    text = refusal(msgspec.json.decode(order, type=ModelOrder), lambda: int(sys.stdin.readline()))
    print(end=f"\n{json.dumps(text)}" if text else "\n")


if __name__ == "__main__":
    main(sys.argv[1])
