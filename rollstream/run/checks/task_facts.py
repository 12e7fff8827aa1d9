"""The messages between a check and the process that builds the task."""

from typing import Any

import msgspec

from rollstream.producers.tasks.dataset_survey import DatasetSurvey, LongPrompt


class OwnParts(msgspec.Struct, frozen=True):
    """Names the parts that roles load at their start; "" for one that is not used or needs no try.
    `objective` is the JSON of `ObjectiveSettings` for a loss of the user's own; `lora` are the
    settings of an adapter.
    """

    episode: str = ""
    scoring: str = ""
    scoring_names: tuple[str, ...] = ()
    renderer: str = ""
    tool_format: str = "auto"
    choose: str = ""
    advantage: str = ""
    loss: str = ""
    objective: str = ""
    architecture: str = ""
    engine: str = ""
    context_max: int = 0
    lora: dict[str, Any] = {}
    model_config: dict[str, int | float | bool | str] = {}

    @property
    def is_heavy(self) -> bool:
        """Whether a try imports torch or transformers, which takes seconds."""
        return bool(self.renderer or self.objective or self.architecture)


class TaskOrder(msgspec.Struct, frozen=True):
    """`prompt_tokens_max` of a prompt (None: as many as the data set needs), `evaluation` held-out
    prompts (None: no evaluation), set by a user if `is_evaluation_set`; `is_taught`: the task makes
    documents for a warm-up; `has_turns`: dialogues are continued; `detects_calls`: agents' calls of
    tools have the chat template's format; `is_judged`: the verifier is called, of a mixture those
    of the parts from number `judged_from` on.
    """

    seed: int
    prompt_tokens_max: int | None
    evaluation: int | None
    is_evaluation_set: bool
    is_taught: bool
    is_judged: bool
    has_turns: bool = False
    detects_calls: bool = False
    parts: OwnParts = OwnParts()
    judged_from: int = 0


class TaskFacts(msgspec.Struct, frozen=True):
    """Or why the task is `refused`. `longest` are the longest prompts, `held_out` is the number of
    held-out ones, -1 if not ordered; `largest_place` is the call with the `largest_token` if the
    tokenizer has no such token. `parts` are the labels of a mixture's parts, `survey_parts` those
    of the surveys, `unevaluated` those that hold out no prompt.
    """

    refused: str = ""
    name: str = ""
    surveys: list[DatasetSurvey] = []
    longest: list[LongPrompt] = []
    held_out: int = -1
    largest_token: int = 0
    largest_place: str = ""
    warnings: list[str] = []
    parts: list[str] = []
    survey_parts: list[str] = []
    unevaluated: list[str] = []

    @property
    def has_rows(self) -> bool:
        """Whether a row of any data set can be used."""
        return not self.surveys or any(each.faults < each.sampled for each in self.surveys)


class JudgedFact(msgspec.Struct, frozen=True):
    """The verifier's answer to a made-up answer: a `reward`, or why there is none that can be
    trained on; `is_final`: no call can succeed on this machine. `scores` are those of a scorer's
    function.
    """

    reward: float = 0.0
    reason: str = ""
    is_final: bool = False
    seconds: float = 0.0
    scores: dict[str, float] = {}
