"""Reads trajectories of other programs from JSON lines (docs/reference/replay.md has the format).

An invalid line raises a `ConfigurationError` that names the file, the line and the remedy; no line
is skipped. Text is encoded as it is: no template, and no special tokens except those written in it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from rollstream.consumers.replay.offline_log import SourceTrajectory
from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.errors import ConfigurationError, DecodeError
from rollstream.streams.records import GENERATED, PROMPT, Trajectory
from rollstream.streams.values import Span, Version

LINE_BYTES_MAX = 64 << 20
LOGPROB_MAX = 1e-3  # rounding error of a token with probability 1
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
TextEncoder = Callable[[str], Sequence[int]]
START_VERSION = Version(0, 0)


class OfflineLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line: `prompt` and `completion`, each as text or tokens, or, for several turns, `tokens`
    with the source of each (0 prompt, 1 generated, 2 environment).
    """

    reward: float
    prompt: str | list[Token] | None = None
    completion: str | list[Token] | None = None
    tokens: list[Token] | None = None
    sources: list[Literal[0, 1, 2]] | None = None
    logprobs: list[float] | None = None
    temperature: float = 1.0
    group: str | int | None = None
    trajectory: str | None = None
    task: str = "offline"
    finish: Literal["stop", "length"] = "stop"


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file of JSON lines; `encode` is the model's tokenizer, None if it has none."""

    path: Path
    encode: TextEncoder | None

    def trajectories(self) -> Iterator[SourceTrajectory]:
        """The trajectories in the order of their lines."""
        decoder = msgspec.json.Decoder(OfflineLine)
        seen: set[str] = set()
        for number, text in self._lines():
            try:
                draft = self._draft(decoder.decode(text), number)
                if draft.record.trajectory in seen:
                    raise ValueError(f"a second trajectory {draft.record.trajectory!r}")
                seen.add(draft.record.trajectory)
                yield draft
            except (msgspec.MsgspecError, DecodeError, ValueError) as error:
                raise ConfigurationError(
                    f"{self.path} line {number}: {error}; correct the line or remove it "
                    "(docs/reference/replay.md has the format)"
                ) from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self.path.open("rb") as file:
            number = 0
            while text := file.readline(LINE_BYTES_MAX):
                number += 1
                if len(text) == LINE_BYTES_MAX:
                    raise ConfigurationError(
                        f"{self.path} line {number} is longer than {LINE_BYTES_MAX >> 20} MiB"
                    )
                if text.strip():
                    yield number, text

    def _draft(self, line: OfflineLine, number: int) -> SourceTrajectory:
        tokens, sources = self._tokens(line)
        generated = sources.count(GENERATED)
        known = line.logprobs is not None
        record = Trajectory(
            trajectory=line.trajectory or f"line-{number}",
            group=0,
            index=0,
            attempt=1,
            task=line.task,
            rollout=self.path.name,
            rollout_term=0,
            tokens=np.array(tokens, np.uint32),
            sources=np.array(sources, np.uint8),
            logprobs=np.array(line.logprobs if known else [0.0] * generated, np.float32),
            spans=(Span(0, generated, START_VERSION),),
            finish=line.finish,
            reward=line.reward,
            trainer_version=START_VERSION,
            started_s=0.0,
            finished_s=0.0,
            temperature=line.temperature,
        )
        sample_of(record, 0.0)
        if len(record.logprobs) and record.logprobs.max() > LOGPROB_MAX:
            raise ValueError("a log-probability is above 0")
        prompt = next(i for i, source in enumerate(sources) if source != PROMPT)
        group = f"={line.group}" if line.group is not None else repr(tokens[:prompt])
        return SourceTrajectory(group, record, 0, None, known)

    def _tokens(self, line: OfflineLine) -> tuple[list[int], list[int]]:
        """The line's tokens and the source of each."""
        if line.tokens is not None and line.prompt is None and line.completion is None:
            if line.sources is None:
                raise ValueError("`tokens` need `sources`, one for each of them")
            return line.tokens, [*line.sources]
        if line.prompt is None or line.completion is None or line.tokens or line.sources:
            raise ValueError("give `prompt` and `completion`, or `tokens` and `sources`")
        prompt, completion = self._encoded(line.prompt), self._encoded(line.completion)
        return prompt + completion, [PROMPT] * len(prompt) + [GENERATED] * len(completion)

    def _encoded(self, given: str | list[int]) -> list[int]:
        if not isinstance(given, str):
            return given
        if self.encode is None:
            raise ValueError(
                "text needs the model's tokenizer, and its folder has no tokenizer.json; give "
                "tokens instead"
            )
        return list(self.encode(given))
