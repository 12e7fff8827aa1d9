"""Data sets of reasoning_gym. A prompt's `reference` carries the generated entry as JSON to the
process that judges.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
import dataclasses
import json
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast
from zlib import crc32

import xxhash

from rollstream.errors import ConfigurationError, TooFewHeldOut
from rollstream.import_path import nearest
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.base import Document, Score, TaskPrompt, Turns
from rollstream.producers.tasks.text import TaskText

_TUPLE, _PAIRS, _FRACTION = "$tuple", "$pairs", "$fraction"
CHUNK = 500  # entries per seed: the library's own default size of a data set
# Questions tried per position. A quarter of all questions is held out, so 64 in a row are held out
# by chance once in 4^64 positions: where it happens, the data set has no other question.
ATTEMPTS = 64
_RESERVED = {"seed": "it follows from the run's seed", "size": "the order has no end"}
_WHERE = "task.options of reasoning_gym"


def pack(value: Any) -> Any:
    """Returns JSON values, from which `unpack` restores an entry. Raises `ConfigurationError` for
    an unsupported type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item) for item in cast(list[Any], value)]
    # Restored as such, because some scoring functions compare tuples.
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in cast(tuple[Any, ...], value)]}
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value)
        if all(isinstance(key, str) and not key.startswith("$") for key in pairs):
            return {key: pack(item) for key, item in pairs.items()}
        return {_PAIRS: [[pack(key), pack(item)] for key, item in pairs.items()]}
    if isinstance(value, Fraction):
        return {_FRACTION: str(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist())
    raise ConfigurationError(
        f"an entry of this data set holds a {type(value).__name__}, which cannot be sent to the "
        "reward process; choose another data set, or write a task of your own around it"
    )


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(item) for item in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    table = cast(dict[str, Any], value)
    if _TUPLE in table:
        return tuple(unpack(item) for item in table[_TUPLE])
    if _PAIRS in table:
        return {unpack(key): unpack(item) for key, item in table[_PAIRS]}
    if _FRACTION in table:
        return Fraction(table[_FRACTION])
    return {key: unpack(item) for key, item in table.items()}


class Gym:
    """`parameters` are those of the data set. `judge` reads the whole answer, or with `answer_tag`
    the text in the last pair of these tags.
    """

    name = "reasoning_gym"

    def __init__(
        self, text: TaskText, dataset: str, answer_tag: str = "", **parameters: Any
    ) -> None:
        self._text, self._dataset, self._tag = text, dataset, answer_tag
        self._held_out = lru_cache(maxsize=1)(self._find_held_out)
        self._open = lru_cache(maxsize=16)(_dataset_opener(dataset, parameters))

    @property
    def stop(self) -> tuple[int, ...]:
        return self._text.stop

    def tokenizer(self) -> TextTokenizer:
        return self._text.tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        """Returns the first of the position's `ATTEMPTS` questions that is neither held out nor too
        long. Raises `ConfigurationError` if there is none.
        """
        entry, tokens = self._training(f"train/{seed}", position)
        return TaskPrompt(tokens, json.dumps(pack(entry)))

    def held_out(self, count: int) -> list[TaskPrompt]:
        return list(self._held_out(count))

    def documents(self, seed: int, count: int) -> list[Document]:
        """Returns the data set's own answers, to questions that are not held out. Raises
        `ConfigurationError` for a data set without answers.
        """
        documents: list[Document] = []
        for place in range(count):
            entry, tokens = self._training(f"warm-up/{seed}", place)
            if not isinstance(entry["answer"], str):
                raise ConfigurationError(
                    f"{self._dataset} gives no answers to learn from: set model.path to a "
                    "checkpoint to start from"
                )
            answer = entry["answer"]
            text = f"<{self._tag}>{answer}</{self._tag}>" if self._tag else answer
            documents.append(Document(tokens, self._text.response(text)))
        return documents

    def judge(self, reference: str, turns: Turns) -> Score:
        answer = self._text.answer(turns)
        if self._tag:
            _, begin, inside = answer.rpartition(f"<{self._tag}>")
            answer, end, _ = inside.partition(f"</{self._tag}>")
            answer = answer if begin and end else ""
        # The entry cannot be generated again: with the same seed some data sets differ between two
        # processes (they iterate over sets of strings, whose order depends on PYTHONHASHSEED).
        score = self._open(0).score_answer(answer.strip(), unpack(json.loads(reference)))
        return Score(float(score))

    def _find_held_out(self, count: int) -> list[TaskPrompt]:
        prompts: dict[str, TaskPrompt] = {}
        for place in range(ATTEMPTS * (count + 4)):
            entry = self._entry("held out", place)
            if entry["question"] in prompts or not _is_held_out(entry):
                continue
            tokens = self._text.prompt(entry["question"])
            if not self._text.length_fault(tokens):
                prompts[entry["question"]] = TaskPrompt(tokens, json.dumps(pack(entry)))
            if len(prompts) == count:
                return list(prompts.values())
        raise TooFewHeldOut(
            f"evaluation.prompts: {count} asked for, {self._dataset} with these parameters holds "
            f"out {len(prompts)} different questions; ask for no more{self._limit()}",
            len(prompts),
        )

    def _training(self, stream: str, position: int) -> tuple[Mapping[str, Any], tuple[int, ...]]:
        # Each attempt reads the same position of another stream.
        for attempt in range(ATTEMPTS):
            entry = self._entry(f"{stream}/{attempt}", position)
            if _is_held_out(entry):
                continue
            tokens = self._text.prompt(entry["question"])
            if not self._text.length_fault(tokens):
                return entry, tokens
        raise ConfigurationError(
            f"{self._dataset} with these parameters: {ATTEMPTS} questions in a row for position "
            f"{position} are held out or too long; widen its parameters{self._limit()}"
        )

    def _entry(self, stream: str, place: int) -> Mapping[str, Any]:
        # A stream is an endless sequence of chunks: data sets of `CHUNK` entries, each with a hash
        # of the stream's name and the chunk's number as its seed.
        chunk, index = divmod(place, CHUNK)
        seed = xxhash.xxh3_64_intdigest(f"{stream}/{chunk}".encode()) % 2**31
        return self._open(seed)[index]

    def _limit(self) -> str:
        limit = self._text.prompt_tokens_max
        room = "rollouts.context_max − sampling.tokens_max"
        return "" if limit is None else f" (prompts have room for {limit} tokens: {room})"


def _is_held_out(entry: Mapping[str, Any]) -> bool:
    # A quarter of all questions, by a checksum of the text: equally in every stream, even where a
    # data set has few.
    return crc32(entry["question"].encode()) % 4 == 0


def _dataset_opener(name: str, parameters: Mapping[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "reasoning_gym":
            raise
        raise ConfigurationError(
            "task.name = \"reasoning_gym\" needs the extra `tasks`: pip install 'rollstream[tasks]'"
        ) from error
    # The library's own mixture of data sets.
    if name == "composite":
        raise ConfigurationError(f'{_WHERE}: mix data sets with task.name = "mixture" instead')
    if name not in DATASETS:
        hint = nearest(name, DATASETS, cutoff=0.5) or f"; there are {', '.join(sorted(DATASETS))}"
        raise ConfigurationError(f"{_WHERE}: no data set {name!r}{hint}")
    kind, configuration = DATASETS[name]
    defaults = {field.name: field.default for field in dataclasses.fields(configuration)}
    chosen = {key: _checked(name, key, parameters[key], defaults) for key in parameters}

    def opened(seed: int) -> Any:
        return kind(configuration(seed=seed, size=CHUNK, **chosen))

    try:
        opened(0)[0]
    except Exception as error:  # a data set may raise anything; the message includes it
        text = str(error) or type(error).__name__
        raise ConfigurationError(f"{_WHERE}: {name} refuses its parameters: {text}") from error
    return opened


def _checked(name: str, key: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    if key in _RESERVED:
        raise ConfigurationError(f"{_WHERE}: {key} is not given, {_RESERVED[key]}")
    if key not in defaults:
        parameter_names = sorted(defaults.keys() - _RESERVED)
        hint = nearest(key, parameter_names) or f"; it has {', '.join(parameter_names)}"
        raise ConfigurationError(f"{_WHERE}: {name} has no parameter {key!r}{hint}")
    default = defaults[key]
    # The library itself takes any text for true.
    for kind, kind_name in _KINDS:
        if isinstance(default, kind):
            if not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool):
                raise ConfigurationError(
                    f"{_WHERE}: {key} of {name} must be {kind_name}, got {value!r}"
                )
            break
    return tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value


_KINDS = (((bool,), "true or false"), ((int, float), "a number"))
"""Types of parameters' plain defaults, and what an error calls them."""
