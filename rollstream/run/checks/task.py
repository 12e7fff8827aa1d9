"""Checks a run's task by the facts that `task_process.py` writes."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector

import msgspec

from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.trainer.data.selection import BUILT_IN
from rollstream.producers.rewards.worker import READ_BYTES, end_process, ended_reason, spawn_process
from rollstream.producers.scoring.build import SERVICES
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.dataset_rows import SKIPPED_SHARE
from rollstream.producers.tasks.dataset_survey import COUNTED_ROWS, DatasetSurvey
from rollstream.run.checks.findings import Finding
from rollstream.run.checks.fitting import evaluated_tokens, held_out_within
from rollstream.run.checks.process_time import ProcessTime, output_file
from rollstream.run.checks.task_facts import JudgedFact, OwnParts, TaskFacts, TaskOrder
from rollstream.run.config.settings import Configuration, lacks_verifier
from rollstream.storage.model_folder.lora_folder import ALL_LINEAR
from rollstream.storage.settings import ModelSettings

# Longest wait for the facts, in which the user's modules are imported, in time of the process
# (`ProcessTime`); the time between two looks at it.
FACTS_S, LOOK_S = 60.0, 0.05
# Longest waits for a verifier whose process sleeps, and for one that computes or imports.
IDLE_S, JUDGED_S = 2.0, 20.0
# After a verifier that hangs or ends its process, those of the parts behind it are called by
# another process, with at most so many in all.
STARTS_MAX = 4
# More for a try that imports torch or transformers on a busy machine.
HEAVY_S = 60.0
PLAIN_ARCHITECTURE = "Qwen3ForCausalLM"
PLAIN_SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PLAIN_FIELDS = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "max_position_embeddings",
    "vocab_size",
}  # fmt: skip
# Of the end of the process's output.
_PRINTED_BYTES = 4096
_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """`judged` has a fact about each part's verifier, or the reason why it gave none; `ended`
    states why there are no facts.
    """

    facts: TaskFacts | None
    judged: Sequence[JudgedFact | str] = ()
    ended: str = ""


def task_order(c: Configuration, set_keys: frozenset[str], has_model: bool) -> TaskOrder:
    lengths = {"rollouts.context_max", "sampling.tokens_max"}
    is_fixed = lengths <= set_keys or c.task.name not in ("dataset", "tools")
    return TaskOrder(
        seed=c.seed,
        prompt_tokens_max=c.rollouts.context_max - c.sampling.tokens_max if is_fixed else None,
        evaluation=c.evaluation.prompts if c.evaluation.enabled else None,
        is_evaluation_set="evaluation.prompts" in set_keys,
        is_taught=not has_model,
        is_judged=not _why_uncalled(c),
        has_turns=c.agent.is_active and c.agent.turns_max > 1,
        detects_calls=c.agent.is_active and c.agent.tool_format == "auto",
        parts=_own_parts(c, not has_model and c.has_model),
    )


def _own_parts(c: Configuration, is_made: bool) -> OwnParts:
    t, scoring = c.trainer, c.scoring.function
    is_own_loss = ":" in t.loss
    lora = c.model.lora
    is_plain = _is_plain_model(c.model) and (not lora.rank or lora.targets == (ALL_LINEAR,))
    tries_model = is_made and not is_plain
    return OwnParts(
        episode=c.agent.episode,
        scoring="" if scoring in SERVICES or c.scoring.holds_reference else scoring,
        scoring_names=c.scoring.names,
        renderer=c.agent.renderer if c.agent.is_active and c.agent.renderer != "none" else "",
        tool_format=c.agent.tool_format,
        choose="" if t.choose in BUILT_IN else t.choose,
        advantage=t.advantage if ":" in t.advantage else "",
        loss=t.loss if is_own_loss else "",
        objective=(
            t.model_dump_json(include=set(ObjectiveSettings.model_fields)) if is_own_loss else ""
        ),
        architecture=c.model.architecture if tries_model else "",
        engine=c.rollouts.engine,
        context_max=c.rollouts.context_max,
        lora=lora.model_dump() if lora.rank else {},
        model_config=c.model.config if tries_model else {},
    )


def _is_plain_model(model: ModelSettings) -> bool:
    # A try imports transformers, which takes longer than all other checks.
    if model.architecture != PLAIN_ARCHITECTURE or not model.config.keys() <= PLAIN_FIELDS:
        return False
    sizes = {**PLAIN_SIZES, **model.config}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return False
    heads, shared = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    return int(heads) % int(shared) == 0 and int(sizes["head_dim"]) % 2 == 0


def _why_uncalled(c: Configuration) -> str:
    secrets = [name for name in c.task.environment if _SECRET.search(name)]
    if secrets:
        return f"it gets {', '.join(secrets)}, so a call may cost money"
    if not c.has_model:
        return f"the engine {c.rollouts.engine!r} writes no answers"
    if c.task.reward == "late" and c.scoring.function in SERVICES:
        return f"scoring.function = {c.scoring.function!r} gives the rewards"
    return ""


class TaskProcess:
    """Runs from its construction; the caller may do other work before `answer`."""

    def __init__(self, task: TaskSettings, order: TaskOrder) -> None:
        self._task, self._order = task, order
        self._facts_s = FACTS_S + (HEAVY_S if order.parts.is_heavy else 0.0)
        self._start()

    def _start(self) -> None:
        # The child writes into the file.
        self._printed, self._data = output_file(), b""
        order = msgspec.json.encode(self._order).decode()
        words = ("rollstream.run.checks.task_process", self._task, order)
        self._child = spawn_process(*words, stderr=self._printed)

    def answer(self) -> TaskAnswer:
        """Waits for the facts for a bounded time, and ends the process."""
        facts: TaskFacts | None = None
        judged: list[JudgedFact | str] = []
        for number in range(STARTS_MAX):
            if number:
                self._order = msgspec.structs.replace(self._order, judged_from=len(judged))
                self._start()
            try:
                if (line := self._line(self._facts_s, self._facts_s)) is None:
                    ended = self._ended(f"{self._facts_s:g} s")
                    return TaskAnswer(facts, self._rest(facts, judged), ended)
                facts = msgspec.json.decode(line, type=TaskFacts)
                if facts.refused or not self._order.is_judged:
                    return TaskAnswer(facts)
                self._judge(self._judged_count(facts), judged)
            except msgspec.DecodeError as error:
                reason = f"something else wrote to its pipe: {error}"
                if facts is None:
                    return TaskAnswer(None, (), reason)
                judged.append(reason)
            finally:
                end_process(self._child)
                self._printed.close()
            if len(judged) >= self._judged_count(facts):
                break
        return TaskAnswer(facts, self._rest(facts, judged))

    def _judged_count(self, facts: TaskFacts) -> int:
        return len(facts.parts) or 1 + bool(self._order.parts.scoring)

    def _judge(self, count: int, judged: list[JudgedFact | str]) -> None:
        """The last of the verifiers' answers is the first that did not answer."""
        run_s = self._task.reward_timeout_s
        while len(judged) < count:
            line = self._line(IDLE_S, JUDGED_S)
            if line is None:
                waited = (
                    f"a check waits ({IDLE_S:g} s without use of the CPU, {JUDGED_S:g} s with it); "
                    f"a run waits task.reward_timeout_s = {run_s:g} s"
                )
                judged.append(self._ended(waited))
                return
            judged.append(msgspec.json.decode(line, type=JudgedFact))

    def _rest(
        self, facts: TaskFacts | None, judged: Sequence[JudgedFact | str]
    ) -> Sequence[JudgedFact | str]:
        count = self._judged_count(facts) if facts is not None else 0
        reason = f"not called, because those of {STARTS_MAX} parts before it did not answer"
        return [*judged, *[reason] * (count - len(judged))]

    def _line(self, sleep_s: float, limit_s: float) -> bytes | None:
        """Returns None if no line arrives before the process has slept for `sleep_s`, or has had
        `limit_s` of its own time.
        """
        assert self._child.stdout is not None
        clock = ProcessTime(self._child.pid)
        with DefaultSelector() as selector:
            selector.register(self._child.stdout, EVENT_READ)
            while b"\n" not in self._data:
                if selector.select(LOOK_S):
                    more = os.read(self._child.stdout.fileno(), READ_BYTES)
                    if not more:
                        return None
                    self._data += more
                elif clock.is_over(limit_s, sleep_s):
                    return None
        line, _, self._data = self._data.partition(b"\n")
        return line

    def _ended(self, waited: str) -> str:
        try:
            self._child.wait(0.2)
        except subprocess.TimeoutExpired:
            return f"it took longer than {waited}"
        self._printed.seek(0)
        lines = self._printed.read()[-_PRINTED_BYTES:].decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ended_reason(self._child) + (f": {last}" if last else "")


def task_findings(c: Configuration, answer: TaskAnswer) -> Iterator[Finding]:
    """`c` has the fitted defaults."""
    facts = answer.facts
    if facts is None:
        verdict = "warning" if answer.ended.startswith("it took") else "refused"
        server = c.task.options.get("server")
        waits = f" (its tool server {server} may not have answered)" if server else ""
        text = f"task {c.task.name!r} could not be built: {answer.ended}{waits}"
        if verdict == "warning":
            text += (
                "; its data were not read, so no default (rollouts.context_max, "
                "evaluation.prompts) was fitted to them: set these, or let the task's modules "
                "import what takes so long at the first call"
            )
        yield Finding("task", verdict, text)
        return
    if facts.refused:
        yield Finding("task", "refused", facts.refused)
        return
    labels = facts.survey_parts or [""] * len(facts.surveys)
    for label, survey in zip(labels, facts.surveys, strict=True):
        yield _data_finding(survey, label)
    if not facts.has_rows:
        return
    yield _length_finding(c, facts)
    for warning in facts.warnings:
        yield Finding("template", "warning", warning)
    if c.agent.is_active and c.task.system:
        text = 'programs get task.system as task["system"]: they send it as their first message'
        yield Finding("agent", "ok", text)
    held_out = held_out_within(facts, c.rollouts.context_max - c.sampling.tokens_max)
    if held_out >= 0 and c.evaluation.enabled:
        yield _evaluation_finding(c, held_out, facts.unevaluated)
    evaluated, room = evaluated_tokens(c, facts), c.rollouts.context_max
    if evaluated > room:
        text = (
            f"evaluation.tokens_max = {c.evaluation.tokens_max}: with the longest held-out prompt "
            f"an answer has {evaluated} tokens, and is cut at rollouts.context_max = {room}"
        )
        yield Finding("evaluation", "warning", text)
    yield from _verifier_findings(c, answer, facts.parts)


def _data_finding(survey: DatasetSurvey, label: str) -> Finding:
    about = "" if survey.is_counted else "at least "
    seen = "" if survey.is_whole else f", {survey.sampled:,} of them read"
    text = f"part {label}: " if label else ""
    text += f"{survey.name}: {about}{survey.rows:,} rows{seen}"
    figures = {
        "rows": survey.rows,
        "rows_read": survey.sampled,
        "rows_unusable": survey.faults,
    }
    if not survey.named:
        return Finding("data", "ok", text, figures)
    if survey.faults:
        remedy = "mend them or take them out"
        rule = _skip_rule(survey.faults, survey.sampled, survey.too_many, remedy)
        text += f"; {survey.faults} cannot be used ({rule})"
    if survey.shared:
        text += f"; {survey.shared} held-out ones are trained on too, and are not evaluated"
    text += f": {'; '.join(survey.named)}"
    return Finding("data", "refused" if survey.too_many else "warning", text, figures)


def _skip_rule(count: int, looked_at: int, is_over: bool, remedy: str) -> str:
    rule = f"at most one in {SKIPPED_SHARE} is skipped"
    if is_over:
        return f"{rule}: {remedy}"
    if count * SKIPPED_SHARE > looked_at:
        return f"{rule}, and the run ends if the rest is like the {looked_at:,} rows read: {remedy}"
    return f"skipped, as up to one in {SKIPPED_SHARE}"


def _length_finding(c: Configuration, facts: TaskFacts) -> Finding:
    limit = c.rollouts.context_max - c.sampling.tokens_max
    longest = facts.longest[0].tokens if facts.longest else 0
    bounds = (
        f"the {limit} that rollouts.context_max − sampling.tokens_max "
        f"({c.rollouts.context_max} − {c.sampling.tokens_max}) leaves"
    )
    figures = {"prompt_tokens_longest": longest, "prompt_tokens_max": limit}
    too_long = [prompt for prompt in facts.longest if prompt.tokens > limit]
    if not too_long:
        text = f"longest prompt: {longest} tokens, within {bounds}"
        return Finding("prompts", "ok", text, figures)
    rows = min((survey.rows for survey in facts.surveys), default=0)
    sampled = sum(survey.sampled for survey in facts.surveys)
    is_over = not facts.surveys or any(
        sum(prompt.tokens > limit for prompt in survey.longest) * SKIPPED_SHARE > survey.rows
        for survey in facts.surveys
    )
    # A data set counts its longest ones alone, no more than so many.
    is_least = len(too_long) >= COUNTED_ROWS
    places = "; ".join(f"{prompt.place}: {prompt.tokens}" for prompt in too_long[:5])
    more = f"; and {len(too_long) - 5} more" if len(too_long) > 5 else ""
    remedy = "change these settings or take the rows out"
    rule = _skip_rule(len(too_long), sampled, is_over, remedy)
    if is_least and not is_over:
        rule = f"a run skips at most {rows // SKIPPED_SHARE:,} of them and else ends: {remedy}"
    count = f"{len(too_long)}{' or more' if is_least else ''}"
    text = f"{count} prompts have more tokens than {bounds}; {rule}: {places}{more}"
    return Finding("prompts", "refused" if is_over else "warning", text, figures)


def _evaluation_finding(c: Configuration, held_out: int, unevaluated: Sequence[str]) -> Finding:
    prompt_count, figures = c.evaluation.prompts, {"held_out": held_out}
    held_out_path = c.task.options.get("held_out")
    if held_out_path and not held_out:
        text = (
            f"task.options.held_out = {str(held_out_path)!r}: no prompt of it is left to evaluate: "
            "each is trained on too, or has too many tokens; name rows that task.options.path does "
            "not have, or set evaluation.enabled = false"
        )
        return Finding("evaluation", "refused", text, figures)
    if prompt_count > held_out:
        text = (
            f"evaluation.prompts: {prompt_count} asked for, {held_out} are held out; ask for no "
            "more, raise task.options.held_out_share, or name a file as task.options.held_out"
        )
        return Finding("evaluation", "refused", text, figures)
    text = (
        f"the first {prompt_count} prompts of {held_out:,} held-out ones, in their order"
        if held_out > prompt_count
        else (f"{prompt_count} held-out prompts")
    )
    if unevaluated:
        text += f"; none of part {', '.join(unevaluated)}, which holds out no prompt"
    return Finding("evaluation", "ok", text, figures)


def _verifier_findings(
    c: Configuration, answer: TaskAnswer, labels: Sequence[str]
) -> Iterator[Finding]:
    uncalled = _why_uncalled(c)
    for place, label in enumerate(labels or [""]):
        part = c.task.parts[place] if labels else c.task
        path = part.options.get("verifier", "")
        name = str(path) if path else f"reward of task {part.name!r}"
        name = f"part {label}: {name}" if label else name
        if lacks_verifier(part.name, part.options):
            yield Finding("verifier", "ok", f"{name}: none: scoring.function gives the rewards")
        elif uncalled:
            yield Finding("verifier", "ok", f"{name}: not called: {uncalled}")
        else:
            yield _judged_finding(name, answer.judged[place])
    # The last one is that of a scorer.
    if len(answer.judged) > len(labels or [""]):
        yield _scored_finding(c.scoring.function, answer.judged[-1])


def _scored_finding(path: str, scored: JudgedFact | str) -> Finding:
    reason = scored if isinstance(scored, str) else scored.reason
    name = f"scoring.function = {path}"
    if reason:
        text = f"{name}: no scores of a made-up answer: {reason}"
        is_final = isinstance(scored, JudgedFact) and scored.is_final
        return Finding("scorer", "refused" if is_final else "warning", text)
    assert isinstance(scored, JudgedFact)
    scores = ", ".join(f"{score} {value:g}" for score, value in scored.scores.items())
    return Finding("scorer", "ok", f"{name}: {scores} for a made-up answer", scored.scores)


def _judged_finding(name: str, judged: JudgedFact | str) -> Finding:
    if isinstance(judged, str):
        return Finding("verifier", "warning", f"{name}: no reward of a made-up answer: {judged}")
    if judged.is_final:
        return Finding("verifier", "refused", f"{name}: {judged.reason}")
    if judged.reason:
        text = f"{name}: no reward of a made-up answer: {judged.reason}"
        return Finding("verifier", "warning", text)
    text = f"{name}: reward {judged.reward:g} for a made-up answer"
    if judged.seconds > IDLE_S:
        text += f", after {judged.seconds:.1f} s with its imports"
    return Finding("verifier", "ok", text, {"reward": judged.reward})
