"""The messages between a check and the process that builds the task: what to look at (`TaskOrder`),
what the task is like (`TaskFacts`), and what its verifier returned (`JudgedFact`).
"""

from typing import Any

import msgspec

from rollstream.producers.tasks.dataset_survey import DatasetSurvey, LongPrompt


class OwnParts(msgspec.Struct, frozen=True):
    """Names what roles load at their start, by the settings of these names; "" for what the run
    does not use or what needs no try. `objective` is the JSON of `ObjectiveSettings` for a loss of
    the user's own; `lora` are the settings of an adapter, empty without one.
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
    """Orders what is looked at: prompts have at most `prompt_tokens_max` tokens (None: as many as
    the data set needs), `evaluation` held-out prompts are wanted (None: no evaluation), and
    a user asked for as many if `is_evaluation_set`; `is_taught`: the task makes documents for a
    warm-up; `has_turns`: dialogues are continued; `detects_calls`: agents' calls of tools are read
    in the chat template's format; `is_judged`: the verifier is called. `parts` are tried besides.
    Of a mixture the verifiers of the parts from number `judged_from` on are called.
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
    """States what the task is like, or why it is `refused`. `longest` are the longest prompts,
    `held_out` is the number of held-out ones, -1 if it was not asked for; `largest_place` is the
    call with the `largest_token` if the tokenizer has no such token. `parts` are the labels of a
    mixture's parts, `survey_parts` those of the surveys, and `unevaluated` those that hold out no
    prompt; all are empty for another task.
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
        """Whether there is a task to look at: not if no row of all data sets can be used."""
        return not self.surveys or any(each.faults < each.sampled for each in self.surveys)


class JudgedFact(msgspec.Struct, frozen=True):
    """States what the verifier returned for the made-up answer: a `reward`, or why there is none
    that can be trained on; `is_final`: no call can succeed on this machine. `seconds` is the time
    of the call. Of a scorer's function `scores` are what it returned.
    """

    reward: float = 0.0
    reason: str = ""
    is_final: bool = False
    seconds: float = 0.0
    scores: dict[str, float] = {}
