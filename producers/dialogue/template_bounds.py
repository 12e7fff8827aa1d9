"""Bounds the rendering of a chat template, a program that comes with the model's files and could
run without end in the thread that serves agents.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any

TEMPLATE_STEPS_MAX = 1_000_000
"""Most lines that run in a rendering; one of 1 000 messages runs about 30 000."""
TEMPLATE_TEXT_MAX = 64 << 20
"""Most characters of a rendering; the longest prompts have some millions."""
_FILE = "<template>"  # the file name of compiled templates


def render_bounded(render: Callable[[], str], templates: Sequence[str]) -> str:
    """Raises `ValueError` above `TEMPLATE_STEPS_MAX` lines of the template or `TEMPLATE_TEXT_MAX`
    characters.
    """
    if any(_has_powers(template) for template in templates):
        raise ValueError("it raises to a power (**), for which no bound holds")
    # Templates are compiled to Python, so the trace function sees each line that runs. Counting
    # depends on no time and changes no library.
    before = sys.gettrace()
    sys.settrace(_TemplateTrace().call)
    try:
        return render()
    finally:
        sys.settrace(before)


class _TemplateTrace:
    def __init__(self) -> None:
        self._steps = self._characters = 0

    def call(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any] | None:
        return self._step(frame, event, value) if frame.f_code.co_filename == _FILE else None

    def _step(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
        self._steps += 1
        if self._steps > TEMPLATE_STEPS_MAX:
            raise ValueError(f"it did not end within {TEMPLATE_STEPS_MAX:,} steps")
        if event == "return" and isinstance(value, str):  # a template yields its text in parts
            self._characters += len(value)
            if self._characters > TEMPLATE_TEXT_MAX:
                raise ValueError(f"it makes more than {TEMPLATE_TEXT_MAX:,} characters")
        return self._step


@lru_cache(maxsize=16)
def _has_powers(template: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError

    before = ""
    try:
        for _, kind, text in Environment().lex(template):
            if kind == "whitespace":
                continue
            # `f(**values)` has no power.
            if kind == "operator" and text == "**" and before not in ("(", ","):
                return True
            before = text
    except TemplateSyntaxError:  # rendering reports it
        return False
    return False
