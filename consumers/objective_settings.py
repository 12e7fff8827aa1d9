"""Settings of the training objective: advantage, importance weight, surrogate, masks against
outliers, normaliser, regularisers (`ObjectiveSettings`), and the published objectives as presets of
these settings (`OBJECTIVE_PRESETS`). Those of one loss alone are declared in its file
(`objectives/losses/`). `named_version` reads the settings that name another policy.
docs/explanation/learning.md has the formulas.
"""

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, create_model

from rollstream.consumers.credit import GAE, scored_reference
from rollstream.consumers.objectives.losses.base import Bounds
from rollstream.consumers.objectives.losses.kinds import loss_kinds, settings_of_losses
from rollstream.import_path import nearest
from rollstream.storage.settings import FIXED, TAKEN, Settings

ADVANTAGE_NAMES = "grpo", "centred", "leave_one_out", "batch", GAE

PresetName = Literal[
    "", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "aipo", "topr", "dppo", "decoupled_ppo",
    "reinforce_pp", "rloo", "ppo",
]  # fmt: skip


class CriticSettings(Settings):
    """The critic of `advantage = "gae"`: it learns the value of each action, the return that the
    policy has from it on (docs/explanation/learning.md, Critic).
    """

    body: Annotated[Literal["own", "policy"], FIXED] = "own"
    """What the value head reads: a copy of the starting model that is trained apart, or the trained
    policy's own last hidden states.
    """
    action: Literal["token", "turn"] = "token"
    """What one step of GAE is: a generated token, or all tokens that an episode generates in one
    turn.
    """
    gamma: float = Field(default=1.0, ge=0, le=1)
    """γ: the discount of a reward for each action before it."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of GAE: 1 trusts the rewards alone, 0 the value of the next action."""
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """ε of value clipping: how far repeated updates of a step may move a value from the one that
    made its advantage; null: no bound.
    """
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the critic, which follows the schedule of `trainer.lr`; null: that
    one.
    """
    warmup: int = Field(default=0, ge=0)
    """First steps of the run in which only the critic learns; they publish version 0 again."""
    loss_weight: float = Field(default=0.1, ge=0)
    """Weight of the value loss in the policy's own body (`body = "policy"`); with 0 the value head
    learns alone.
    """


class SharedSettings(Settings):
    """The settings of the objective that no loss has for itself."""

    preset: PresetName = ""
    """A published objective: it decides advantage, loss, ratio and normaliser, so that a preset on
    the command line wins over what a file sets. A value from the preset's own source or a higher
    one wins over it (docs/explanation/learning.md, Presets). A run file that sets none of these
    settings has the preset `topr`.
    """
    advantage: str = "grpo"
    """Group-relative advantage: `grpo` (R − mean)/std, `centred` R − mean, `leave_one_out` R − mean
    of the others, `batch` (R − mean)/std of the whole update, or `module:function`. Or `gae`: the
    advantage over a critic's values, by the settings of `critic`.
    """
    critic: CriticSettings = CriticSettings()
    """The critic, used where `advantage` is `gae`."""
    loss: str = "truncated_is"
    """Surrogate: a loss of ours (docs/reference/settings.md, trainer.loss) or `module:function`. In
    a file also a table with the loss's own settings: `[trainer.loss]` with `kind = "ppo_clip"`.
    """
    ratio: Literal["none", "token", "sequence", "product"] = "token"
    """Importance ratio π/μ per token, per sequence as geometric mean (GSPO) or as product, or none
    (1, for `truncated_is` alone).
    """
    mask_ratio: Bounds | None = None
    """Tokens whose own ratio π/μ is outside have no loss (IcePop, masked importance sampling)."""
    mask_sequence: Bounds | None = None
    """Sequences whose geometric mean of π/μ is outside have no loss."""
    mask_negative: Annotated[float, Field(gt=0)] | None = None
    """Sequences with a negative advantage whose mean log(μ/π) is above have no loss (off-policy
    sequence mask).
    """
    aggregate: Literal["token", "sequence", "prompt", "constant"] = "token"
    """Mean over all tokens of an update; over sequences of their token means; over prompts of their
    token means; or the sum over `aggregate_tokens` and over sequences (Dr. GRPO).
    """
    aggregate_tokens: int = Field(default=1, ge=1)
    """The constant length by which `aggregate = "constant"` divides each sequence's sum."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy of each trained token's distribution, which is maximised."""
    ratio_penalty: float = Field(default=0.0, ge=0)
    """Weight of (log π/μ)² of each trained token, which is minimised."""
    reference_kl: float = Field(default=0.0, ge=0)
    """Weight of the KL to the policy `reference`, which is minimised. Above 0 the trainer keeps
    that model too, and one process must train (`processes = 1`), unless `reference_by` is `score`.
    """
    reference: str = "v0"
    """The reference policy: `vN`, version N (until it exists: version 0); `every K`, the newest
    version whose number is a multiple of K; or another model, a folder or Hub name as `model.path`.
    """
    reference_by: Literal["trainer", "score"] = "trainer"
    """Who computes the reference's log-probabilities: the `trainer`, which holds that model too, or
    scorers (`scoring.function = "reference"`), whose annotations the trainer then waits for.
    """
    reference_kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL acts: as a term of the `loss`, or in the `reward` of each token, so that it
    lowers the advantages of the tokens before it (docs/explanation/learning.md).
    """
    reference_kl_form: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that KL per token, with d = log π/reference: `k1` d, `k2` d²/2, `k3`
    exp(−d) − 1 + d (docs/explanation/learning.md).
    """
    proximal: str = ""
    """Decoupled PPO: the policy from which `ppo_clip` bounds the update, instead of the one that
    emitted the token: `every K` as in `reference` (1: the version that is trained from), or
    `behaviour`, the token's own version as the trainer computes it. Empty: not decoupled.
    """
    overlong: Annotated[Literal["train", "mask"], TAKEN] = "train"
    """`mask`: answers that ended at a limit of their length count in their group's mean, but have
    no loss (DAPO's overlong filtering).
    """
    overlong_penalty: tuple[int, int] | None = None
    """Generated tokens [from, to]: an answer longer than `from` loses up to 1 of its reward,
    reached at `to` (DAPO's soft overlong punishment).
    """
    ess_guard: Literal["off", "scale", "skip"] = "off"
    """What the effective sample size (`ess`) of an update does: `scale` multiplies the learning
    rate by it (VCPO); `skip` skips an update whose share is below `ess_min`.
    """
    ess_min: float = Field(default=0.3, ge=0, le=1)
    """The share of effective samples below which `ess_guard = "skip"` skips an update."""


if TYPE_CHECKING:
    from rollstream.consumers.objectives.losses.dppo import DppoSettings
    from rollstream.consumers.objectives.losses.ppo_clip import PpoClipSettings
    from rollstream.consumers.objectives.losses.truncated_is import TruncatedIsSettings

    class SettingsOfLosses(DppoSettings, PpoClipSettings, TruncatedIsSettings):
        """The settings of all losses, for the type checker those that are read outside of the
        losses: a loss names the class of its own settings.
        """
else:
    SettingsOfLosses = create_model("SettingsOfLosses", __base__=settings_of_losses())


class ObjectiveSettings(SettingsOfLosses, SharedSettings):
    """The objective that an update maximises."""


PPO_CLIP = {"loss": "ppo_clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}

OBJECTIVE_PRESETS: Mapping[str, Mapping[str, object]] = {
    # DeepSeekMath, arXiv 2402.03300, eq. 3; without its KL term, which Dr. GRPO and DAPO drop too.
    "grpo": {**PPO_CLIP, "advantage": "grpo", "aggregate": "sequence"},
    # Dr. GRPO, arXiv 2503.20783, section 3.2: neither std nor 1/|o|; the constant is the most
    # tokens of an answer (`put_preset`).
    "dr_grpo": {**PPO_CLIP, "advantage": "centred", "aggregate": "constant"},
    # DAPO, arXiv 2503.14476: clip-higher, dynamic sampling, token-level loss, soft overlong
    # punishment over the last fifth of the longest answer.
    "dapo": {
        **PPO_CLIP,
        "clip_high": 0.28,
        "advantage": "grpo",
        "aggregate": "token",
        "filter_equal_rewards": True,
    },
    # GSPO, arXiv 2507.18071, section 5.1: bounds of the length-normalised sequence ratio.
    "gspo": {
        "loss": "ppo_clip",
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "advantage": "grpo",
        "aggregate": "sequence",
    },
    # CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1: no lower bound. The paper gives no number
    # for the upper one; 5 is ours.
    "cispo": {
        "loss": "truncated_is",
        "ratio": "token",
        "ratio_max": 5.0,
        "advantage": "grpo",
        "aggregate": "token",
    },
    # AIPO, LlamaRL, arXiv 2505.24034, section 6: ρ between 2 and 10.
    "aipo": {
        "loss": "truncated_is",
        "ratio": "token",
        "ratio_max": 4.0,
        "advantage": "centred",
        "aggregate": "token",
    },
    # TOPR, arXiv 2503.14286, section 3: weight 1 for positive answers, the truncated ratio of the
    # whole answer for negative ones.
    "topr": {
        "loss": "truncated_is",
        "ratio": "product",
        "ratio_min": 1.0,
        "ratio_max": 1.0,
        "ratio_bounds_negative": [0.0, 1.0],  # a list, as a file has it
        "advantage": "centred",
        "aggregate": "constant",
    },
    # DPPO, arXiv 2602.04879, with the binary total-variation mask.
    "dppo": {
        "loss": "dppo",
        "ratio": "token",
        "divergence_max": 0.2,
        "advantage": "centred",
        "aggregate": "token",
    },
    # Decoupled PPO, AReaL, arXiv 2505.24298, eq. 5: clipped around the version trained from, times
    # the weight proximal/behaviour. The paper does not bound that weight; 5 is the bound of its
    # authors' examples, which leave out the ratios above.
    "decoupled_ppo": {
        **PPO_CLIP,
        "proximal": "every 1",
        "ratio_max": 5.0,
        "advantage": "grpo",
        "aggregate": "token",
    },
    # REINFORCE++-baseline, arXiv 2501.03262: group mean, then the std of the whole batch.
    "reinforce_pp": {**PPO_CLIP, "advantage": "batch", "aggregate": "token"},
    # RLOO, arXiv 2402.14740: a whole answer is one action.
    "rloo": {
        "loss": "truncated_is",
        "ratio": "none",
        "advantage": "leave_one_out",
        "aggregate": "constant",
    },
    # PPO, arXiv 1707.06347, eqs. 7, 9 and 11, with a token as an action; γ and λ are the defaults
    # of `critic`.
    "ppo": {**PPO_CLIP, "advantage": GAE, "aggregate": "token"},
}
"""Preset → the settings of `trainer` that it gives. Each has its source; terms that need a
reference model are not among them.
"""


def loss_requirement(name: str) -> str:
    """Returns what `trainer.loss` must be, with what `name` may have meant; "" if it is a loss of
    ours or has the form of an own function.
    """
    if name in loss_kinds() or ":" in name:
        return ""
    hint = nearest(name, loss_kinds()).removeprefix("; ")
    if name in OBJECTIVE_PRESETS:
        hint = f'{name} is a preset: trainer.preset = "{name}"'
    names = ", ".join(loss_kinds())
    return f"must be one of {names}, or 'module:function'" + (f" ({hint})" if hint else "")


BEHAVIOUR = "behaviour"
"""`trainer.proximal` for each token's own version."""


def named_version(policy: str, version: int) -> int | None:
    """Returns the number of the version that `policy` (`vN` or `every K`) means while `version` is
    trained from; None for another name. A step's policies follow from its number alone.
    """
    if match := re.fullmatch(r"v(\d+)", policy):
        number = int(match[1])
        return number if number <= version else 0
    if match := re.fullmatch(r"every ([1-9]\d*)", policy):
        return version - version % int(match[1])
    return None


def past_policies(settings: ObjectiveSettings) -> tuple[str, ...]:
    """Returns the other policies whose models the trainer holds."""
    is_own = settings.reference_kl and settings.reference_by == "trainer"
    reference = (settings.reference,) if is_own else ()
    return (*reference, settings.proximal) if settings.proximal else reference


def reads_versions(settings: ObjectiveSettings) -> bool:
    """Whether the trainer, or its scorers, read published versions besides the starting model."""
    policies = {*past_policies(settings), scored_reference(settings)}
    return bool(policies - {"v0", ""})


def versions_needed(
    settings: ObjectiveSettings, versions: Collection[int], max_lag: int | None
) -> set[int]:
    """Returns the numbers of the past versions that a trainer, and its scorers, need to continue
    from one of these `versions` up to the highest.
    """
    # A trainer has the version that it continues from itself, and a reference of version 0 is the
    # starting model.
    needed: set[int] = set()
    for policy in past_policies(settings) if versions else ():
        if policy == BEHAVIOUR:
            needed.update(range(max(0, min(versions) - (max_lag or 0)), max(versions) + 1))
        else:
            policy_versions = {version: named_version(policy, version) for version in versions}
            needed.update(
                number
                for version, number in policy_versions.items()
                if number and number != version
            )
    if (reference := scored_reference(settings)) and versions:
        emitted = range(max(0, min(versions) - (max_lag or 0)), max(versions) + 1)
        needed.update(
            number for version in emitted if (number := named_version(reference, version))
        )
    return needed
