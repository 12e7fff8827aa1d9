"""Finds settings of the objective that are valid alone and cannot work together. Pure, except that
a reference's folder is looked for.
"""

from collections.abc import Iterator

from rollstream.consumers.credit import GAE, scored_reference
from rollstream.consumers.objective_settings import (
    ADVANTAGE_NAMES,
    BEHAVIOUR,
    loss_requirement,
    named_version,
    past_policies,
)
from rollstream.consumers.objectives.losses.base import Bounds
from rollstream.consumers.objectives.losses.kinds import loss_kinds
from rollstream.consumers.settings import TrainerSettings
from rollstream.storage.model_folder.hf_folder import CONFIG, find_hf_folder

# The setting's key, and the requirement on its value.
Problem = tuple[str, str]
# Two numbers, in losses' own settings too.
_BOUNDS = tuple(
    name
    for name, field in TrainerSettings.model_fields.items()
    if field.annotation == Bounds | None
)


def objective_problems(
    t: TrainerSettings, max_lag: int | None, versions_max: int, checkpoint_steps: int
) -> Iterator[Problem]:
    """`checkpoint_steps` is how far kept checkpoints reach back."""
    yield from _formula_problems(t)
    yield from _policy_problems(t)
    moves = scored_reference(t) not in ("", "v0") and named_version(t.reference, 0) is not None
    if moves and max_lag is None:
        must = f"must be a number with trainer.reference = {t.reference!r} by scorers"
        yield "dispatch.max_lag", f"{must}: it bounds the versions that are kept for them"
    yield from _critic_problems(t)
    if t.proximal != BEHAVIOUR:
        return
    if max_lag is None:
        must = (
            f"must be a number with trainer.proximal = {BEHAVIOUR!r}: it bounds the versions kept"
        )
        yield "dispatch.max_lag", must
    elif versions_max < checkpoint_steps + max_lag + 1:
        must = (
            f"must be ≥ {checkpoint_steps + max_lag + 1} with trainer.proximal = {BEHAVIOUR!r}: "
            "(checkpoints.keep + 1) · checkpoints.every + dispatch.max_lag + 1 versions are read "
            "again by a trainer that resumes"
        )
        yield "weights.versions_max", must


def _formula_problems(t: TrainerSettings) -> Iterator[Problem]:
    if must := loss_requirement(t.loss):
        yield "trainer.loss", must
    if t.advantage not in ADVANTAGE_NAMES and ":" not in t.advantage:
        must = f"must be one of {', '.join(ADVANTAGE_NAMES)}, or 'module:function'"
        yield "trainer.advantage", must
    able = [repr(name) for name, kind in loss_kinds().items() if kind.settings.takes_no_ratio]
    if t.ratio == "none" and repr(t.loss) not in able:
        names = " or ".join(able)
        must = f"must not be 'none' unless trainer.loss is {names}: a ratio of 1 clips nothing"
        yield "trainer.ratio", must
    if t.ratio_min > t.ratio_max:
        yield "trainer.ratio_min", f"must be ≤ trainer.ratio_max ({t.ratio_max:g})"
    for name in (*_BOUNDS, "overlong_penalty"):
        bounds = getattr(t, name)
        if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
            must = "must be two numbers, 0 ≤ lower ≤ upper"
            yield f"trainer.{name}", must
    if t.overlong_penalty is not None and t.overlong_penalty[0] == t.overlong_penalty[1]:
        yield "trainer.overlong_penalty", "must name two different lengths"
    if t.advantage == "batch" and (t.entropy_bonus or t.ratio_penalty or t.reference_kl):
        must = (
            "must not be 'batch' with entropy_bonus, ratio_penalty or reference_kl: it would scale "
            "them too"
        )
        yield "trainer.advantage", must
    if t.advantage == "batch" and t.process_rewards:
        must = "must not be 'batch' with process_rewards: its divisor is that of whole answers"
        yield "trainer.advantage", must


def _critic_problems(t: TrainerSettings) -> Iterator[Problem]:
    if t.advantage != GAE:
        return
    if t.processes > 1 and t.critic.body == "own":
        must = "must be 'policy' with trainer.processes > 1: ranks do not share a second model"
        yield "trainer.critic.body", must
    if t.critic.warmup >= t.steps:
        must = f"must be < trainer.steps ({t.steps}), or the policy never learns"
        yield "trainer.critic.warmup", must


def _policy_problems(t: TrainerSettings) -> Iterator[Problem]:
    if t.processes > 1 and past_policies(t):
        must = (
            "must be 1 with trainer.reference_kl > 0 or trainer.proximal: ranks do not share "
            "another policy's model (scorers can compute a reference: trainer.reference_by)"
        )
        yield "trainer.processes", must
    # A scorer's model may be on its own machine alone.
    is_model = bool(t.reference_kl) and t.reference_by == "trainer"
    is_model &= named_version(t.reference, 0) is None
    if is_model and not (find_hf_folder(t.reference) / CONFIG).is_file():
        must = "must be 'vN', 'every K', or a model: a folder, or a Hub name in the machine's cache"
        yield "trainer.reference", must
    if not t.proximal:
        return
    is_multiple = t.proximal.startswith("every ") and named_version(t.proximal, 0) is not None
    if t.proximal != BEHAVIOUR and not is_multiple:
        yield "trainer.proximal", f"must be empty, 'every K' with a K ≥ 1, or {BEHAVIOUR!r}"
    able = [repr(name) for name, kind in loss_kinds().items() if kind.settings.takes_proximal]
    if t.loss in loss_kinds() and repr(t.loss) not in able:
        must = f"must be empty unless trainer.loss is {' or '.join(able)} or your own"
        yield "trainer.proximal", must
