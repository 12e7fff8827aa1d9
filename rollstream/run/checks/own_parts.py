"""Tries the user's functions and model class that roles load by name at their start, in the check's
own process (`task_process.py`).
"""

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb

import numpy as np

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.import_path import find_function
from rollstream.producers.engines.kind import engine_kind
from rollstream.producers.scoring.functions import load_function
from rollstream.producers.tasks.base import Task
from rollstream.run.checks.task_facts import OwnParts
from rollstream.streams.foreign_text import reason_text

_LIBRARIES = (
    f"{Path(__file__).parents[3]}{os.sep}",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)
TRIED_REWARDS = (0.0, 1.0, 0.5, 0.0)


def check_own_parts(parts: OwnParts, task: Task) -> None:
    """Raises `ConfigurationError` for the first part with which a role would end at its start."""
    if parts.episode:
        from rollstream.producers.agents.program_process import find_episode

        find_episode(parts.episode)
    if parts.scoring:
        load_function(parts.scoring)
    if parts.renderer:
        from rollstream.producers.agents.chat_format import chat_format
        from rollstream.producers.agents.renderer_bridge import with_renderer

        with_renderer(chat_format(task, parts.tool_format), parts.renderer)
    if parts.choose:
        from rollstream.consumers.trainer.data.selection import load_choice

        load_choice(parts.choose)
        find_function(parts.choose, "trainer.choose", ("candidates", "groups"))
    if parts.advantage:
        _try("trainer.advantage", parts.advantage, lambda: _try_advantage(parts.advantage))
    if parts.objective:
        _try("trainer.loss", parts.loss, lambda: _try_loss(parts.objective))
    if parts.architecture:
        _try_model(parts, task)


def _try(setting: str, path: str, call: Callable[[], None]) -> None:
    try:
        call()
    except ConfigurationError:
        raise
    # A user's function may raise anything.
    except Exception as error:
        raise ConfigurationError(
            f"{setting} = {path!r}, called with made-up numbers: {failure_line(error)}"
        ) from error


def failure_line(error: Exception) -> str:
    """Returns the failure line with the user's own function, file and line: libraries that it calls
    are not its own.
    """
    frames = extract_tb(error.__traceback__)
    user_frames = [
        f for f in frames if not f.filename.startswith(_LIBRARIES) and f.filename[:1] != "<"
    ]
    frame = (user_frames or frames)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{type(error).__name__} in {frame.name}() at {place}: {reason_text(error)}"


def _try_advantage(path: str) -> None:
    from rollstream.consumers.trainer.data.advantages import find_advantage

    find_advantage(path)(np.array(TRIED_REWARDS))


def _try_loss(objective: str) -> None:
    from rollstream.consumers.objective_settings import ObjectiveSettings
    from rollstream.consumers.trainer.learn.surrogate_check import check_own_loss

    check_own_loss(ObjectiveSettings.model_validate_json(objective))


def _try_model(parts: OwnParts, task: Task) -> None:
    import torch

    from rollstream.run.warmup.warmup import untrained_model
    from rollstream.storage.model_folder.lora import attach_adapters
    from rollstream.storage.settings import LoraSettings, ModelSettings

    model = ModelSettings(architecture=parts.architecture, config=parts.model_config)
    # Shapes alone: the model may be large.
    with torch.device("meta"):
        new_model = untrained_model(model, task, 0)
        try:
            engine_kind(parts.engine).check_model(new_model, parts.context_max, bool(parts.lora))
        except EngineRefused as error:
            raise ConfigurationError(
                f"model.architecture: engine {parts.engine!r} cannot serve "
                f"{parts.architecture}: {error}; choose another class or another engine "
                "(rollouts.engine)"
            ) from error
        if parts.lora:
            attach_adapters(new_model, LoraSettings(**parts.lora), 0, torch.float32, "")
