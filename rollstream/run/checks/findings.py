"""The lines of a check."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "warning", "refused"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is the part of the run, `text` one line for people, `figures` the same numbers by
    name.
    """

    subject: str
    verdict: Verdict
    text: str
    figures: Mapping[str, object] = field(default_factory=dict[str, object])

    def line(self) -> dict[str, object]:
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "text": self.text,
            **self.figures,
        }
