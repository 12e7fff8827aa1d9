"""All checks of a run. Nothing is written, uploaded or claimed, and no module of the user is
imported into this process.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollstream.consumers.objective_settings import named_version
from rollstream.errors import EXIT_REFUSED, BusError, ConfigurationError, RollstreamError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import too_few_tokens
from rollstream.run.checks.findings import Finding
from rollstream.run.checks.fitting import fit_data, fit_template
from rollstream.run.checks.idle_settings import idle_settings
from rollstream.run.checks.machine import LOG, machine_findings, store_findings
from rollstream.run.checks.model import ModelFacts, model_findings, read_model_facts
from rollstream.run.checks.model_process import ModelProcess
from rollstream.run.checks.task import TaskProcess, task_findings, task_order
from rollstream.run.config.run_model import local_model_folder, run_model, task_settings
from rollstream.run.config.settings import Configuration
from rollstream.storage.model_folder.hf_folder import CONFIG, find_hf_folder, hf_vocabulary_size
from rollstream.storage.model_folder.hf_weights import check_trainable, read_weight_files


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings with the `configuration` of fitted defaults, and a line for each."""

    configuration: Configuration
    findings: Sequence[Finding]
    fitted: Sequence[str]
    seconds: float

    @property
    def is_refused(self) -> bool:
        return any(finding.verdict == "refused" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 if the run may start, 1 if only its log cannot be reached, which may pass, else 2."""
        refused = {finding.subject for finding in self.findings if finding.verdict == "refused"}
        return EXIT_REFUSED if refused - {LOG} else int(bool(refused))

    def refuse(self) -> None:
        """Raises `ConfigurationError` with every refusal; `BusError` if only the log cannot be
        reached.
        """
        if self.is_refused:
            text = "\n".join(f.text for f in self.findings if f.verdict == "refused")
            raise (ConfigurationError if self.exit_code == EXIT_REFUSED else BusError)(text)


def check_run(
    c: Configuration,
    folder: Path,
    set_keys: frozenset[str],
    recorded: frozenset[str] = frozenset(),
) -> CheckReport:
    """The settings of `set_keys`, dotted, were set by the user and are never changed; those that
    the run `recorded` raise no warning.
    """
    started = time.monotonic()
    notes = [*idle_settings(c, set_keys - recorded), *store_findings(c, folder)]
    if any(note.verdict == "refused" for note in notes):
        return CheckReport(c, notes, (), time.monotonic() - started)
    model, findings = _model(c, folder)
    findings += notes
    c, fitted = fit_template(c, folder, set_keys)
    if any(finding.verdict == "refused" for finding in findings):
        # Without its tokenizer the task would be refused for the same reason once more.
        findings += machine_findings(c, folder, model)
        return CheckReport(c, findings, fitted, time.monotonic() - started)
    # Both processes work while this one looks at the machine.
    builder = None if model is None or not model.bytes else ModelProcess(c, model.folder)
    has_model = c.model.path is not None or not c.has_model or _has_model(c, folder)
    order = task_order(c, set_keys, has_model)
    process = TaskProcess(_task_settings(c, folder), order)
    machine = [*_reference_findings(c, model), *machine_findings(c, folder, model)]
    answer = process.answer()
    if answer.facts is not None and not answer.facts.refused and answer.facts.has_rows:
        c, more = fit_data(c, answer.facts, set_keys)
        fitted = [*fitted, *more]
        largest, size = answer.facts.largest_token, None if model is None else model.vocabulary
        if size is not None and largest >= size:
            error = too_few_tokens(str(c.model.path), size, answer.facts.name, largest)
            if place := answer.facts.largest_place:
                text = f"task {answer.facts.name!r}: {place} has the token {largest}, and "
                text += f"model.path: {str(c.model.path)!r} has {size} tokens"
                findings.append(Finding("task", "refused", text))
            else:
                findings.append(Finding("tokenizer", "refused", str(error)))
    if builder is not None:
        built = builder.findings(c.rollouts.context_max)
        if any(finding.verdict == "refused" for finding in built):
            findings = [finding for finding in findings if finding.subject != "model"]
        findings = [*built, *findings]
    findings += [*task_findings(c, answer), *machine]
    return CheckReport(c, findings, fitted, time.monotonic() - started)


def _reference_findings(c: Configuration, model: ModelFacts | None) -> Iterator[Finding]:
    is_used = c.trainer.reference_kl > 0 or c.scoring.holds_reference
    if not is_used or named_version(c.trainer.reference, 0) is not None:
        return
    folder = find_hf_folder(c.trainer.reference)
    try:
        check_trainable(folder)
        read_weight_files(folder)
    except (ConfigurationError, OSError) as error:
        text = str(error).replace("model.path:", "trainer.reference:")
        yield Finding("reference", "refused", text)
        return
    size, trained_size = hf_vocabulary_size(folder), None if model is None else model.vocabulary
    if size is not None and trained_size is not None and size < trained_size:
        text = f"trainer.reference: {folder} has {size} tokens, the trained model {trained_size}"
        yield Finding("reference", "refused", text)


def _model(c: Configuration, folder: Path) -> tuple[ModelFacts | None, list[Finding]]:
    try:
        is_stored = _has_model(c, folder)
        facts = read_model_facts(c, is_stored)
    except (RollstreamError, OSError) as error:
        return None, [Finding("model", "refused", str(error))]
    is_made = c.model.path is None and c.warmup.enabled
    return facts, list(model_findings(c, facts, is_stored, is_made))


def _has_model(c: Configuration, folder: Path) -> bool:
    """Whether it has a model in its store, or made by a warm-up."""
    is_made = c.model.path is None and (local_model_folder(c, folder) / CONFIG).is_file()
    return is_made or run_model(c, folder) is not None


def _task_settings(c: Configuration, folder: Path) -> TaskSettings:
    # A run without a model yet has the built-in tokenizer, not the paths of a model's folder.
    if c.model.path is None and not _has_model(c, folder):
        return c.task
    return task_settings(c, folder)
