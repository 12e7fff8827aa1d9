"""Names settings that a user set and that change nothing in this run."""

from collections.abc import Iterator

from rollstream.consumers.credit import GAE, scored_reference
from rollstream.consumers.objectives.losses.kinds import loss_kinds
from rollstream.import_path import nearest
from rollstream.producers.engines.kind import ENGINES, engine_kind
from rollstream.producers.scoring.build import SERVICES
from rollstream.run.checks.findings import Finding
from rollstream.run.config.settings import Configuration


def idle_settings(c: Configuration, set_keys: frozenset[str]) -> Iterator[Finding]:
    """A warning for settings that the user set (`set_keys`) without effect, and for annotations
    that no scorer of the run writes.
    """
    for table, is_used, needed in _tables(c):
        if not is_used and (keys := sorted(key for key in set_keys if key.startswith(table))):
            text = f"without effect: {', '.join(keys)} ({needed})"
            yield Finding("settings", "warning", text)
    yield from _unwritten_annotations(c)


def _tables(c: Configuration) -> Iterator[tuple[str | tuple[str, ...], bool, str]]:
    function, is_late = c.scoring.function, c.task.reward == "late"
    yield "agent.", c.agent.is_active, "agent.episode, agent.command or agent.service is not given"
    late_or_own = 'scorers need task.reward = "late" or scoring.function'
    yield "scoring.", is_late or bool(function), late_or_own
    is_service = function in SERVICES or not (is_late or function)
    yield "scoring.service.", is_service, 'scoring.function is neither "http" nor "judge"'
    is_judge = function == "judge" or not (is_late or function)
    yield "scoring.judge.", is_judge, 'scoring.function is not "judge"'
    yield "trainer.critic.", c.trainer.advantage == GAE, f'trainer.advantage is not "{GAE}"'
    # An own loss may read the settings of any other.
    chosen = loss_kinds().get(c.trainer.loss)
    used = set[str]() if chosen is None else {*chosen.keys}
    if c.trainer.proximal:
        used |= {"ratio_min", "ratio_max"}
    for name, loss in loss_kinds().items():
        keys = tuple(f"trainer.{key}" for key in loss.keys - used)
        yield keys, chosen is None, f'trainer.loss is not "{name}"'
    for kind in map(engine_kind, ENGINES):
        for table in kind.tables:
            is_its = kind is c.rollouts.kind
            yield table, is_its, f'rollouts.engine is not "{kind.name}"'
    is_new = c.model.path is None
    for key in ("model.architecture", "model.config."):
        yield key, is_new, "model.path names a model"
    yield "model.config.vocab_size", not is_new, "a new model has that of the task's tokenizer"


def _scored_names(c: Configuration) -> set[str]:
    if c.task.reward != "late" and not c.scoring.function:
        return set()
    # A judge gives one number.
    return set(c.scoring.names[:1] if c.scoring.function == "judge" else c.scoring.names)


def _unwritten_annotations(c: Configuration) -> Iterator[Finding]:
    if scored_reference(c.trainer):
        # Scorers of the reference write it, here or elsewhere.
        return
    inline_names = {"reward"} if c.task.reward == "inline" else set[str]()
    scored = _scored_names(c)
    needed = {*c.trainer.reward_terms, *c.trainer.annotations}
    if scored and not scored - inline_names and not c.agent.is_active:
        text = (
            f"without effect: scoring.function = {c.scoring.function!r}, which would write only "
            f'{", ".join(sorted(scored))}: task.reward = "inline" gives it; set task.reward = '
            '"late", or name what else the scorer writes (scoring.names)'
        )
        yield Finding("settings", "warning", text)
    elif not c.scoring.count and (waiting := sorted((needed & scored) - inline_names)):
        text = (
            f"scoring.count = 0, so this run starts no scorer, and the trainer waits for "
            f"{', '.join(waiting)}: set scoring.count, or start one (`rollstream score`)"
        )
        yield Finding("settings", "warning", text)
    written = inline_names | scored
    awaited = needed - written
    if not awaited:
        return
    name, names = min(awaited), ", ".join(sorted(awaited))
    yield Finding(
        "settings",
        "warning",
        f"trainer.reward_terms and trainer.annotations wait for {names}, which no scorer of this "
        f"run writes{nearest(name, written)}: unless another program does, no "
        f"group is trained and each is closed after {c.dispatch.group_deadline_s:g} s "
        "(dispatch.group_deadline_s)",
    )
