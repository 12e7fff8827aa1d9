"""Names settings that a user set and that change nothing in this run (`idle_settings`)."""

from collections.abc import Iterator

from rollstream.checks.findings import Finding
from rollstream.config.settings import Configuration
from rollstream.consumers.trainer.data.credit import GAE, scored_reference
from rollstream.import_path import nearest
from rollstream.producers.scoring.build import SERVICES


def idle_settings(c: Configuration, set_keys: frozenset[str]) -> Iterator[Finding]:
    """Yields a warning for the settings without effect, and one for annotations that no scorer of
    the run writes. `set_keys` are the settings that the user set.
    """
    for table, is_used, needed in _tables(c):
        if not is_used and (keys := sorted(key for key in set_keys if key.startswith(table))):
            text = f"without effect: {', '.join(keys)} ({needed})"
            yield Finding("settings", "warning", text)
    yield from _unwritten_annotations(c)


def _tables(c: Configuration) -> Iterator[tuple[str, bool, str]]:
    """Yields the begin of settings' keys, whether the run uses them, and what they need."""
    function, is_late = c.scoring.function, c.task.reward == "late"
    yield "agent.", c.agent.is_active, "agent.episode, agent.command or agent.service is not given"
    late_or_own = 'scorers need task.reward = "late" or scoring.function'
    yield "scoring.", is_late or bool(function), late_or_own
    is_service = function in SERVICES or not (is_late or function)
    yield "scoring.service.", is_service, 'scoring.function is neither "http" nor "judge"'
    is_judge = function == "judge" or not (is_late or function)
    yield "scoring.judge.", is_judge, 'scoring.function is not "judge"'
    yield "trainer.critic.", c.trainer.advantage == GAE, f'trainer.advantage is not "{GAE}"'
    is_vllm = c.rollouts.engine == "vllm"
    yield "rollouts.vllm.", is_vllm, 'rollouts.engine is not "vllm"'
    is_new = c.model.path is None
    for key in ("model.architecture", "model.config."):
        yield key, is_new, "model.path names a model"


def _unwritten_annotations(c: Configuration) -> Iterator[Finding]:
    """Yields the annotations that samples wait for and that only another program can write."""
    written: set[str] = set()
    if c.task.reward == "inline":
        written.add("reward")
    if c.task.reward == "late" or c.scoring.function:
        written.update(c.scoring.names)
    if scored_reference(c.trainer):
        return  # scorers of the reference write it, here or elsewhere
    awaited = {*c.trainer.reward_terms, *c.trainer.annotations} - written
    if not awaited or c.scoring.function in SERVICES:
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
