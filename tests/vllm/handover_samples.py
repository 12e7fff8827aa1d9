"""Engines that hand KV over, and a trajectory that moves between them."""

from functools import cache
from pathlib import Path

from engine_samples import V1, Gained, ask, gather, prompt, resumed, run_all
from transformers import PreTrainedModel
from vllm_samples import vllm_model

from producers.engines.base import Request, UpdateMode
from producers.engines.vllm_engine import VllmEngine
from producers.settings import VllmSettings
from streams.records import Sampling

CONTEXT, BLOCK = 192, 32
REQUEST = ask("mine", prompt(70), Sampling(temperature=0, tokens_max=100))
SETTINGS = VllmSettings(process=False, kv_handover=True)


@cache
def model(seed: int = 0) -> PreTrainedModel:
    return vllm_model("qwen3", seed)


@cache
def uninterrupted() -> list[int]:
    return run_all(opened(), [REQUEST])["mine"].tokens


def opened(settings: VllmSettings = SETTINGS) -> VllmEngine:
    """Takes over the one that an earlier test of this module let go of."""
    tensors = model().state_dict()
    return VllmEngine(model().config, tensors, V1, 4, CONTEXT, 4, settings=settings)


def joined(engine: VllmEngine, folder: Path, mode: UpdateMode = "in_flight") -> VllmEngine:
    engine.hand_over("run", folder, mode)
    return engine


def leave(engine: VllmEngine, request: Request = REQUEST, count: int = 40) -> Request:
    """It generates `count` tokens or a few more there, and is given up: how it would go on."""
    engine.submit(request)
    part = {request.trajectory: Gained()}
    while len(part[request.trajectory].tokens) < count:
        gather(part, engine.poll(0.1))
    rest = engine.abort(request.trajectory)
    gather(part, [rest] if rest else [])
    return resumed(request, part[request.trajectory])


def end(engine: VllmEngine, moved: Request) -> list[int]:
    """All tokens that it has generated at its end, wherever."""
    rest = run_all(engine, [moved])[moved.trajectory]
    return moved.tokens[len(REQUEST.tokens) :].tolist() + rest.tokens


def counted(engine: VllmEngine) -> dict[str, int]:
    return dict(engine.handed_over())


def gain(engine: VllmEngine, before: dict[str, int]) -> dict[str, int]:
    """Counts since then: an engine that was taken over counts on."""
    return {name: count - before[name] for name, count in counted(engine).items()}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))
