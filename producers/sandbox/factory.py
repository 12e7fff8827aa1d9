"""Opens sandboxes by the back end that `task.sandbox.backend` names: `bubblewrap`, `docker`, or a
plug-in by `module:attribute`.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from rollstream.import_path import find_callable, nearest
from rollstream.producers.sandbox.base import (
    BackendBuilder,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxOptions,
    SandboxRefused,
    SandboxResult,
)
from rollstream.producers.sandbox_settings import configured_sandboxes
from rollstream.producers.tasks.base import PlainSandbox

BACKENDS = {
    "bubblewrap": "rollstream.producers.sandbox.bubblewrap:Bubblewrap",
    "docker": "rollstream.producers.sandbox.docker:DockerBackend",
}
"""Registered name → builder, imported on use."""
LANGUAGES: Mapping[str, tuple[str, ...]] = {
    "python": ("python3", "main.py"),
    "sh": ("sh", "main.sh"),
    "javascript": ("node", "main.js"),
}
"""Language → the command that runs a text; its last word is the file's name."""
_SETTING = "task.sandbox.backend"


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    backend: str = "bubblewrap"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    options: SandboxOptions = field(default_factory=SandboxOptions)


def plan_of(settings: PlainSandbox) -> SandboxPlan:
    limits = SandboxLimits(
        time_s=settings.time_s,
        output_bytes=settings.output_bytes,
        memory_bytes=settings.memory_mib << 20,
        processes=settings.processes,
        disk_bytes=settings.disk_mib << 20,
    )
    options = SandboxOptions(image=settings.image, readable=tuple(settings.readable))
    return SandboxPlan(settings.backend, limits, options)


_lock = threading.Lock()
_backends: dict[SandboxPlan, SandboxBackend] = {}


def configured_plan() -> SandboxPlan:
    settings = configured_sandboxes()
    return SandboxPlan() if settings is None else plan_of(settings)


def configured_limits() -> SandboxLimits:
    return configured_plan().limits


def open_sandbox(limits: SandboxLimits | None = None) -> Sandbox:
    """Raises `SandboxRefused` where this machine cannot provide one."""
    plan = configured_plan()
    return _backend(plan).open(limits or plan.limits)


def run(
    program: str | Sequence[str],
    *,
    language: str = "python",
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """`program` is a text in `language`, or the words of a command; `files` are in the work folder
    before it starts. Raises `SandboxRefused` where this machine cannot provide one.
    """
    file_bytes = {path: _bytes(data) for path, data in (files or {}).items()}
    if isinstance(program, str):
        if language not in LANGUAGES:
            raise ValueError(f"language {language!r}{nearest(language, LANGUAGES)}")
        command = LANGUAGES[language]
        file_bytes[command[-1]] = _bytes(program)
    else:
        command = tuple(program)
    plan = configured_plan()
    return _backend(plan).run_once(command, _bytes(stdin), file_bytes, limits or plan.limits)


def sandbox_report(plan: SandboxPlan | None = None) -> Mapping[str, str]:
    """Returns the mechanism of each bound, by its name. Raises `SandboxRefused` where this machine
    cannot provide a sandbox.
    """
    return _backend(plan or configured_plan()).report()


def _backend(plan: SandboxPlan) -> SandboxBackend:
    with _lock:
        backend = _backends.get(plan)
        if backend is None:
            if ":" not in plan.backend and plan.backend not in BACKENDS:
                raise SandboxRefused(
                    f"{_SETTING} = {plan.backend!r} is not registered"
                    f"{nearest(plan.backend, BACKENDS)}; registered: {', '.join(BACKENDS)}; name "
                    "your own as `module:attribute`"
                )
            path = BACKENDS.get(plan.backend, plan.backend)
            build = cast(BackendBuilder, find_callable(path, _SETTING))
            backend = _backends[plan] = build(plan.options)
        return backend


def _bytes(text: str | bytes) -> bytes:
    return text.encode(errors="surrogatepass") if isinstance(text, str) else text
