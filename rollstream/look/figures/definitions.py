"""Defines every figure that two places may show: no figure has two names.
`docs/reference/figures.md` and the explorer's `figures.js` are generated from it.

A name is `SUBJECT.NAME`, of the run or of one step, group, rollout, role, task, evaluation or fate.
Figures of a step have the names of its `StepDone`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """`definition` names the unit."""

    label: str
    definition: str


def _of(subject: str, rows: Iterable[tuple[str, str, str]]) -> dict[str, Figure]:
    return {f"{subject}.{name}": Figure(label, meaning) for name, label, meaning in rows}


RUN = _of("run", [
    ("steps", "steps", "steps done, a repeated one once"),
    ("steps_wanted", "steps of the run", "steps that the run is to make (trainer.steps)"),
    ("seconds", "time", "from the first to the last moment of work (a trajectory that starts or "
     "finishes, a step that ends), without the pauses between two sessions"),
    ("elapsed_s", "time since the start", "seconds since the run was started, without the pauses "
     "between two sessions"),
    ("warmup_s", "warm-up", "seconds of the warm-up, which are not part of the run's time"),
    ("tokens_trained", "tokens trained", "sum over the steps of their trained tokens"),
    ("tokens_per_s", "tokens trained per second", "trained tokens of the whole run by its time"),
    ("recent_trained_per_s", "tokens trained per second, last steps", "trained tokens of the last "
     "ten steps by the time from the end of the step before them to the end of the last"),
    ("generated_per_s", "tokens generated per second, now", "sum over the living rollouts of their "
     "speed in the last ten seconds; of a run that is over that of its last minute"),
    ("trajectories_per_s", "trajectories per second, last minute", "trajectories finished in the "
     "last minute, per second"),
    ("lag_consumed_mean", "lag when trained, mean of the run", "mean over the steps of the mean "
     "lag of their samples when they were trained"),
    ("lag_consumed_max", "lag when trained, largest of the run", "largest lag in steps of a token "
     "when it was trained"),
    ("lag_recent", "lag when trained, mean of the last steps", "mean over the last ten steps of "
     "the newest term of the mean lag of their samples when they were trained"),
    ("lag_tokens", "tokens by lag", "trained tokens of all steps by their lag when trained"),
    ("restarts", "restarts", "terms after the first of each role, without the starts by a later "
     "session; of processes without terms their deaths"),
    ("version", "newest version", "number of the newest published version"),
    ("groups_admitted", "groups admitted", "groups that dispatch admitted"),
    ("groups_trained", "groups trained", "admitted groups that a take began to train and no later "
     "record ended as poisoned"),
    ("groups_filtered", "groups filtered", "admitted groups closed because all rewards were equal"),
    ("groups_expired", "groups expired", "admitted groups closed for their lag or at a deadline"),
    ("groups_dead", "groups dead", "admitted groups closed because too few samples ended alive, or "
     "because the learner could not compute them"),
    ("groups_open", "groups open", "admitted groups that are not ended"),
    ("groups_ready", "groups ready", "open groups whose samples and annotations are all there"),
    ("trajectories", "trajectories", "first completions of trajectories, dead ones included"),
    ("trajectories_stop", "stopped", "first completions that ended by themselves"),
    ("trajectories_length", "cut at the limit", "first completions that were cut at their limit of "
     "tokens"),
    ("trajectories_dead", "dead trajectories", "first completions that failed"),
    ("samples_released", "released", "trajectories that were not needed any more, because enough "
     "others of their group had ended (task.redundancy)"),
    ("waiting_share", "dialogues waiting", "share of the time of dialogues and episodes in which "
     "they waited for their environments or programs"),
    ("evaluated", "evaluated up to version", "newest version that was evaluated"),
    ("goal_s", "time to the goal", "seconds of the run, without pauses, until the first evaluated "
     "version with a sampled held-out accuracy of .75 or more"),
    ("goal_step", "step of the goal", "the first version with that accuracy"),
    ("bytes", "size", "bytes of all files in the run's folder"),
])  # fmt: skip
STEP = _of("step", [
    ("reward_mean", "mean reward", "mean reward of the step's trained samples"),
    ("accuracy", "accuracy", "share of the step's trained samples with a reward of 1 or more"),
    ("loss", "loss", "loss of the policy gradient, as the optimiser saw it"),
    ("entropy", "entropy", "mean entropy of the policy at the trained tokens, in nats"),
    ("kl", "KL estimate", "estimate of the KL divergence of the policy from the one that generated "
     "the tokens, in nats (r − 1 − log r)"),
    ("ess", "effective sample size", "share of the tokens that the importance weights leave: "
     "(Σr)² by N·Σr²"),
    ("clipped", "clipped", "share of the trained tokens whose ratio was clipped"),
    ("ratio_max", "largest ratio", "largest importance ratio of a trained token"),
    ("gradient_norm", "gradient norm", "global norm of the gradient before it was clipped"),
    ("learning_rate", "learning rate", "of the step's last update"),
    ("length_median", "length, median", "median of the generated tokens of the trained samples"),
    ("length_p99", "length, p99", "99th percentile of the generated tokens of the trained samples"),
    ("lag_finish_mean", "lag at finish, mean", "mean over the trained samples of the lag of their "
     "oldest token when they finished: the newest version known then minus that token's"),
    ("lag_finish_max", "lag at finish, largest", "largest lag of a trained sample at its finish"),
    ("lag_consumed_mean", "lag when trained, mean", "mean over the trained samples of the least "
     "and the largest lag of their tokens: the version that the step trains from minus theirs"),
    ("lag_consumed_max", "lag when trained, largest", "largest lag of a trained token"),
    ("tokens_trained", "tokens trained", "generated tokens with loss: not masked, not abandoned"),
    ("seconds", "took", "seconds of the step by the trainer's clock, waiting included"),
    ("wait_s", "waiting", "seconds in which the trainer waited for trajectories"),
    ("busy_s", "computing", "CPU seconds of forward and backward passes, over all threads"),
    ("value_loss", "value loss", "loss of the critic, per action"),
    ("explained_variance", "explained variance", "share of the variance of the returns that the "
     "critic's values know"),
    ("takes", "takes", "micro-batches of the step"),
    ("groups", "groups", "groups that the step's takes began to train"),
    ("trained", "trajectories trained", "trained samples"),
    ("mismatch_mean", "mismatch", "mean |Δ log p| between engine and trainer over the tokens of "
     "lag 0 that both computed under one version, in nats"),
    ("lag_tokens", "tokens by lag", "trained tokens by how many steps their version was behind the "
     "one that the step trains from"),
    ("lag_trajectories", "trajectories by lag", "trajectories with trained tokens of this lag"),
])  # fmt: skip
GROUP = _of("group", [
    ("reward_mean", "mean reward of the group", "mean reward of the group's rewarded completions"),
    ("reward_std", "± std", "sample standard deviation of the group's rewards"),
    ("tokens_mean", "mean tokens", "mean generated tokens of the group's first completions"),
    ("finished", "finished", "first completions of the group"),
    ("samples", "samples", "trajectories that the group was admitted with"),
    ("step", "step", "step that trained or closed the group"),
    ("wave", "wave", "as many admitted groups as one step trains"),
])  # fmt: skip
ROLLOUT = _of("rollout", [
    ("trajectories", "trajectories", "first completions by this rollout, dead ones included"),
    ("tokens", "tokens", "generated tokens of the first completions by this rollout"),
    ("cut", "cut at the limit", "first completions that were cut at their limit of tokens"),
    ("dead", "dead", "first completions that failed"),
    ("versions", "versions", "distinct versions that the rollout served"),
    ("idle_s", "idle", "seconds in which the rollout had nothing to generate, over all its terms"),
    ("idle_share", "idle share", "idle seconds over all terms by the run's time"),
    ("recent_idle_share", "idle now", "share of the last ten seconds without anything to generate"),
    ("tokens_per_s", "tokens/s now", "generated tokens per second in the last ten seconds"),
    ("running", "running", "trajectories in slots"),
    ("waiting", "waiting", "trajectories assigned and without a slot yet"),
    ("slots", "slots", "sequences that are decoded together"),
    ("version", "version held", "version that generates"),
    ("kv_used", "KV used", "tokens in the KV cache"),
    ("kv_capacity", "KV capacity", "tokens that fit into the KV cache"),
    ("answers", "answers", "first completions that ended alive"),
    ("answer_tokens", "tokens of answers", "generated tokens of the answers"),
    ("ms_per_token", "ms/token", "median over its answers of milliseconds per generated token"),
    ("longest_s", "longest", "seconds of its longest answer"),
    ("behind_s", "behind", "mean seconds from a step's end to its weights in the engine"),
])  # fmt: skip
ROLE = _of("role", [
    ("restarts", "restarts", "terms after the first, without the starts by a later session; of a "
     "process without terms its deaths"),
])  # fmt: skip
FATE = _of("fate", [
    ("trajectories", "trajectories", "admitted trajectories of this fate, finished or not"),
    ("answers", "answers", "finished trajectories of this fate: trained (one of its tokens was), "
     "or dropped for the lag of its tokens or at the deadline of its group"),
    ("length_median", "median length", "median of their generated tokens"),
    ("reward_median", "median reward", "median of their rewards"),
])  # fmt: skip
TASK = _of("task", [
    ("trajectories", "trajectories", "first completions of the task"),
    ("reward_mean", "mean reward of all", "mean reward of all rewarded first completions of the "
     "task, also of those that were not trained"),
    ("tokens_mean", "mean tokens", "mean generated tokens of those that ended alive"),
])  # fmt: skip
TRAJECTORY = _of("trajectory", [
    ("reward", "reward", "the first annotation `reward` of the trajectory, else its record's own"),
    ("tokens", "tokens", "generated tokens"),
    ("lag_finish", "lag at finish", "the newest version that its rollout knew when it finished "
     "minus that of its oldest token; a lag below 0 counts as 0"),
    ("lag_consumed", "lag when trained", "the version that its step trains from minus that of its "
     "oldest token; a lag below 0 counts as 0"),
    ("step", "step", "step that trained it"),
    ("moves", "moves", "how often it was moved to another rollout"),
])  # fmt: skip
EVALUATION = _of("evaluation", [
    ("accuracy_sampled", "held-out accuracy, sampled", "share of right sampled answers to held-out "
     "prompts, by the version that answered"),
    ("accuracy_greedy", "held-out accuracy, greedy", "share of right greedy answers to held-out "
     "prompts, by the version that answered"),
    ("pass_at", "held-out, pass@k", "unbiased estimate of the share of held-out prompts that one "
     "of k sampled answers solves"),
    ("length_median", "held-out length, median", "median of the generated tokens of sampled "
     "answers to held-out prompts"),
    ("length_p99", "held-out length, p99", "99th percentile of the generated tokens of sampled "
     "answers to held-out prompts"),
])  # fmt: skip

FIGURES: Mapping[str, Figure] = {
    **RUN, **STEP, **GROUP, **ROLLOUT, **ROLE, **FATE, **TASK,
    **TRAJECTORY, **EVALUATION,
}  # fmt: skip


def figure_of(name: str) -> Figure:
    """The name may have a part behind `/`: a task, or the k of pass@k. Raises `KeyError` for an
    unknown one.
    """
    return FIGURES[name.partition("/")[0]]
