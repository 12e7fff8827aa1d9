"""Promises the columns of the views of `rollstream query`: type, meaning, and the release since
which they are stable. `docs/reference/views.md` is generated from it.

An added column gets a line with its release; one of an earlier release stays
(`tests/figures/test_promised_columns.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.look.figures.definitions import FIGURES

FIRST = "0.1.0"


@dataclass(frozen=True, slots=True)
class Column:
    """A column with its `type` in DuckDB, and the release since which it is stable."""

    type: str
    meaning: str
    since: str = FIRST


def _figures(subject: str, *names: str) -> dict[str, Column]:
    """Each with the figure's definition."""
    return {name: Column("DOUBLE", FIGURES[f"{subject}.{name}"].definition) for name in names}


STEP_FIGURES = (
    "reward_mean", "accuracy", "loss", "entropy", "kl", "ess", "clipped", "ratio_max",
    "gradient_norm", "learning_rate", "length_median", "length_p99", "lag_finish_mean",
    "lag_finish_max", "lag_consumed_mean", "lag_consumed_max", "tokens_trained", "seconds",
    "wait_s", "busy_s",
)  # fmt: skip
ENVELOPE = {
    "partition": Column("INTEGER", "of the topic"),
    "offset": Column("BIGINT", 'in the partition; quote it in SQL (`"offset"`)'),
    "timestamp": Column("TIMESTAMP WITH TIME ZONE", "when the log took the record"),
    "key": Column("VARCHAR", "the record's key; bytes that are no UTF-8 are replaced"),
    "schema": Column(
        "VARCHAR", "name and version, e.g. `trajectory/1`; null for bytes that are no record"
    ),
    "hash": Column(
        "VARCHAR",
        "xxh3-64 of the record's bytes in hex, as the ledger names it; null for a tombstone",
    ),
    "term": Column(
        "BIGINT", "term of the single-holder role that wrote it; null in topics of many writers"
    ),
    "sequence": Column("BIGINT", "its number within (term, partition)"),
    "void": Column(
        "BOOLEAN",
        "whether the fence drops it (invariant 7): a replaced holder wrote it, or it is a repeat",
    ),
    "reason": Column("VARCHAR", "why it is no record of this topic; null for records"),
    "original": Column(
        "BLOB", "its bytes, if it is no record or has fields that this program does not know"
    ),
    "header": Column(
        "BLOB",
        "the JSON header of its bytes ([wire format](wire-format.md)), null beside "
        "`original` and in files of release 0.1.0",
        "0.2.0",
    ),
}
FOLDERS = {
    "date": Column("DATE", "day of the record's timestamp (UTC)"),
    "run": Column("VARCHAR", "name of the run"),
    "topic": Column("VARCHAR", "name of the topic"),
}
TOPICS = {
    "trajectories": {
        "trajectory": Column("VARCHAR", "name, unique in the run"),
        "group": Column("BIGINT", "place of its prompt in the seeded order"),
        "index": Column("BIGINT", "which sample of the group"),
        "attempt": Column(
            "BIGINT",
            "of the trajectory; the first completion in the partition's order counts (invariant 2)",
        ),
        "task": Column("VARCHAR", "task of the prompt"),
        "rollout": Column("VARCHAR", "the rollout that finished it"),
        "rollout_term": Column("BIGINT", "that rollout's term"),
        "tokens": Column("UINTEGER[]", "all tokens, prompt first"),
        "sources": Column("UTINYINT[]", "of each token: 0 prompt, 1 generated, 2 environment"),
        "logprobs": Column("FLOAT[]", "of each generated token, NaN included"),
        "spans": Column(
            'STRUCT("start" BIGINT, "end" BIGINT, "version" STRUCT(number BIGINT, term BIGINT))[]',
            "generated tokens [start, end) came from this version (invariant 3)",
        ),
        "finish": Column("VARCHAR", "`stop`, `length` or `dead`"),
        "reward": Column("DOUBLE", "null when it comes later, as an annotation"),
        "trainer_version": Column(
            "STRUCT(number BIGINT, term BIGINT)", "newest version known when it finished"
        ),
        "started_s": Column("DOUBLE", "seconds since 1970"),
        "finished_s": Column("DOUBLE", "seconds since 1970"),
        "temperature": Column("DOUBLE", "of the sampling"),
        "reason_": Column("VARCHAR", "why it died"),
        "scores": Column("MAP(VARCHAR, DOUBLE)", "parts of the reward"),
        "environment": Column("VARCHAR", "JSON of the task's environment"),
        "moves": Column("BIGINT", "how often it was moved to another rollout"),
        "wave": Column("BIGINT", "wave of its group"),
        "reference": Column("VARCHAR", "the task's own JSON for the reward"),
        "predicted": Column(
            "BIGINT", "generated tokens that its order expected; 0: nothing was known"
        ),
        "drafts": Column(
            "STRUCT(runs BIGINT[], steps BIGINT, guessed BIGINT, asked BIGINT, found BIGINT, "
            "lookup_s DOUBLE)",
            "how its generated tokens came of drafts ([wire format](wire-format.md)); null: "
            "nothing was drafted",
        ),
        "failures": Column(
            "VARCHAR[]", "failures of its environment that were tried again", "0.2.0"
        ),
        "waiting_s": Column("DOUBLE", "seconds that it waited for its environment", "0.2.0"),
        "turns": Column(
            'STRUCT(digest VARCHAR, history VARCHAR, "start" BIGINT, "generated" BIGINT, '
            '"end" BIGINT, finish VARCHAR, waiting_s DOUBLE, generating_s DOUBLE, fork '
            "VARCHAR, overridden VARCHAR[], answer VARCHAR)[]",
            "the turns of an agent's episode ([records](records.md))",
            "0.2.0",
        ),
        "branches": Column(
            'STRUCT("start" BIGINT, "at" BIGINT)[]',
            "where tokens continue another path than the one before them; empty: all are one path",
            "0.2.0",
        ),
        "abandoned": Column(
            "BIGINT[]",
            "indices (from 0) of turns that only an earlier start of the program reached: not"
            " trained",
            "0.2.0",
        ),
        "arrays": Column(
            'STRUCT("name" VARCHAR, dtype VARCHAR, shape BIGINT[], '
            'ranges STRUCT("start" BIGINT, "end" BIGINT)[], bytes BIGINT)[]',
            "named arrays that the engine wrote beside the tokens; `ranges` are the tokens that "
            "have a row",
            "0.2.0",
        ),
        "array_bytes": Column(
            "UTINYINT[]",
            "their rows, zstd frames, `bytes` bytes each; null without arrays "
            "([wire format](wire-format.md))",
            "0.2.0",
        ),
        "needs": Column(
            "VARCHAR[]", "features without which training on it would be wrong", "0.2.0"
        ),
    },
    "annotations": {
        "trajectory": Column("VARCHAR", "the trajectory that it is about"),
        "group": Column("BIGINT", "that trajectory's group"),
        "name": Column("VARCHAR", "name of the fact; the first of a (trajectory, name) counts"),
        "values": Column("FLOAT[]", "one value, or one per token"),
        "scorer": Column("VARCHAR", "the scorer that wrote it"),
        "reason_": Column("VARCHAR", "why there will never be values"),
    },
    "ledger": {
        "configuration_hash": Column("VARCHAR", "configured: hash of the settings that matter"),
        "code_revision": Column("VARCHAR", "configured"),
        "resumed_from": Column("BIGINT", "configured: step of the checkpoint"),
        "accepted": Column("BOOLEAN", "configured: whether a difference was accepted"),
        "forked_from": Column(
            "VARCHAR", "configured: run and checkpoint that a fork began from, else empty"
        ),
        "run_id": Column(
            "VARCHAR", "configured: the id that was drawn at the begin of the run", "0.2.0"
        ),
        "step": Column("BIGINT", "every take record, step_done, group_closed"),
        "update": Column("BIGINT", "take: optimiser update within the step"),
        "micro_batch": Column("BIGINT", "take, take_retried"),
        "members": Column(
            'STRUCT(trajectory VARCHAR, "at" STRUCT("partition" BIGINT, "offset" BIGINT), '
            "hash VARCHAR)[]",
            "take: exactly what it trained, in order",
        ),
        "groups": Column(
            'STRUCT("group" BIGINT, members STRUCT(trajectory VARCHAR, "at" '
            'STRUCT("partition" BIGINT, "offset" BIGINT), hash VARCHAR)[])[]',
            "take: members of groups whose first take it is",
        ),
        "annotations": Column(
            'STRUCT(trajectory VARCHAR, "name" VARCHAR, "at" STRUCT("partition" BIGINT, '
            '"offset" BIGINT), hash VARCHAR)[]',
            "take: late facts that it used",
        ),
        "read": Column(
            "STRUCT(topic VARCHAR, offsets BIGINT[])[]",
            "take: how far the trainer had read these topics when it fixed `groups`",
            "0.2.0",
        ),
        "believed": Column(
            "STRUCT(number BIGINT, term BIGINT)", "take: the highest believed version then", "0.2.0"
        ),
        "settings": Column(
            'STRUCT("group" BIGINT, configuration_hash VARCHAR)[]',
            "take: the settings of its groups' prompts and the group from which they hold, if"
            " they were changed before",
            "0.2.0",
        ),
        "micro_batches": Column(
            "BIGINT[]",
            "take_failed, superseded, takes_repeated: which takes of the update",
            "0.2.0",
        ),
        "error": Column("VARCHAR", "take_failed: what the learner raised", "0.2.0"),
        "out_of_memory": Column(
            "BOOLEAN", "take_failed: whether memory was too short for them", "0.2.0"
        ),
        "poisoned": Column(
            "BIGINT[]", "superseded: groups that end dead with these takes", "0.2.0"
        ),
        "detail": Column("VARCHAR", "superseded, group_closed"),
        "epoch": Column("BIGINT", "takes_repeated: counted from 0, the first training", "0.2.0"),
        "version": Column("STRUCT(number BIGINT, term BIGINT)", "step_done: what was published"),
        "state_hash": Column("VARCHAR", "step_done: of masters and optimiser"),
        "takes": Column("BIGINT", "step_done: how many the step had"),
        "metrics": Column("MAP(VARCHAR, DOUBLE)", "step_done"),
        "counts": Column("MAP(VARCHAR, BIGINT)", "step_done"),
        "time_s": Column("DOUBLE", "step_done: seconds since 1970"),
        "weights_hash": Column(
            "VARCHAR",
            "step_done: of the published tensors, where a state above 1 GB is not hashed at "
            "every step",
            "0.2.0",
        ),
        "group": Column("BIGINT", "group_closed"),
        "reason_": Column("VARCHAR", "group_closed: `filtered`, `expired` or `dead`"),
        "role": Column("VARCHAR", "opened: whose term begins"),
        "term_": Column("BIGINT", "opened: that term"),
        "release": Column("VARCHAR", "opened: the writer's release; empty in 0.1.0", "0.2.0"),
        "needs": Column(
            "VARCHAR[]", "opened: features that a reader of this topic must know", "0.2.0"
        ),
        "knows": Column("VARCHAR[]", "opened: features that the writer knows", "0.2.0"),
    },
    "admissions": {
        "group": Column("BIGINT", "the admitted group"),
        "wave": Column("BIGINT", "its wave: as many admitted groups as one step trains"),
        "trajectories": Column("VARCHAR[]", "names of its samples"),
        "deadline_s": Column("DOUBLE", "seconds from admission"),
        "prompt": Column('STRUCT("partition" BIGINT, "offset" BIGINT)', "where its prompt lay"),
        "needed": Column(
            "BIGINT", "completions that fill the group; 0: all of its samples", "0.2.0"
        ),
        "settings": Column(
            'STRUCT("group" BIGINT, configuration_hash VARCHAR)',
            "the settings of its prompt and the group from which they hold, if they were "
            "changed before",
            "0.2.0",
        ),
        "role": Column("VARCHAR", "opened: whose term begins"),
        "term_": Column("BIGINT", "opened: that term"),
        "release": Column("VARCHAR", "opened: the writer's release; empty in 0.1.0", "0.2.0"),
        "needs": Column(
            "VARCHAR[]", "opened: features that a reader of this topic must know", "0.2.0"
        ),
        "knows": Column("VARCHAR[]", "opened: features that the writer knows", "0.2.0"),
    },
    "applied": {
        "rollout": Column("VARCHAR", "the rollout"),
        "rollout_term": Column("BIGINT", "its term"),
        "version": Column("STRUCT(number BIGINT, term BIGINT)", "what it serves now"),
        "hash_": Column("VARCHAR", "hash of the version's manifest"),
        "checked": Column("VARCHAR", "`read_back` if any tensor was read back, else `hashes`"),
        "tensors": Column("BIGINT", "tensors handed to the engine"),
        "seconds": Column("DOUBLE", "seconds in which the engine took it"),
        "time_s": Column("DOUBLE", "seconds since 1970"),
        "compared": Column("BIGINT", "tensors read back from the engine and compared"),
    },
}
DERIVED = {
    "settings": {
        "run": Column("VARCHAR", "name of the run"),
        "max_lag": Column("BIGINT", "`dispatch.max_lag`"),
        "process_rewards": Column("BOOLEAN", "`trainer.process_rewards`", "0.2.0"),
    },
    "evaluations": {
        "step": Column("BIGINT", "version that was evaluated"),
        "seconds": Column(
            "DOUBLE", "time from the run's first step to the evaluation, pauses included"
        ),
        **_figures(
            "evaluation", "accuracy_sampled", "accuracy_greedy", "length_median", "length_p99"
        ),
        "shares": Column("MAP(VARCHAR, DOUBLE)", "share of the sampled answers by style"),
        "prompts": Column("VARCHAR", "hash of the prompts' tokens", "0.2.0"),
        "by_prompt": Column(
            "DOUBLE[][]", "of each prompt: right sampled answers, all of them, mean reward", "0.2.0"
        ),
        "line": Column("JSON", "the whole line of `metrics/eval.jsonl`, JSON"),
    },
    "scores": {
        "trajectory": Column("VARCHAR", "the trajectory that it is about"),
        "name": Column("VARCHAR", "name of the fact"),
        "scorer": Column("VARCHAR", "the scorer that wrote it"),
        "value": Column(
            "DOUBLE",
            "the first of its values, with `trainer.process_rewards` their sum; null where it"
            " has a reason",
        ),
        "reason": Column("VARCHAR", "why there will never be a value"),
        "written": Column("TIMESTAMP WITH TIME ZONE", "when the log took the annotation"),
    },
    "rewards": {
        "trajectory": Column("VARCHAR", "name, unique in the run"),
        "group": Column("BIGINT", "its group"),
        "index": Column("BIGINT", "which sample of the group"),
        "task": Column("VARCHAR", "task of its prompt"),
        "reward": Column(
            "DOUBLE",
            "the first annotation `reward`, else the record's own; null: none yet, or dead",
        ),
        "source": Column("VARCHAR", "`annotation` or `record`; null without a reward"),
        "finish": Column("VARCHAR", "`stop`, `length` or `dead`"),
        "rollout": Column("VARCHAR", "the rollout that finished it"),
        "version": Column("BIGINT", "version of its first generated token"),
        "tokens": Column("BIGINT", "generated tokens"),
        "wave": Column("BIGINT", "wave of its group"),
        "moves": Column("BIGINT", "how often it was moved to another rollout"),
        "started_s": Column("DOUBLE", "seconds since 1970"),
        "finished_s": Column("DOUBLE", "seconds since 1970"),
        "seconds": Column("DOUBLE", "from start to finish"),
    },
    "takes": {
        "step": Column("BIGINT", "step that it is of"),
        "update": Column("BIGINT", "optimiser update within the step, from 0"),
        "micro_batch": Column("BIGINT", "number in the update"),
        "term": Column("BIGINT", "term of the trainer that wrote it"),
        "taken": Column("TIMESTAMP WITH TIME ZONE", "when the log took it"),
        "trajectories": Column("BIGINT", "trajectories that it trains"),
        "groups": Column("BIGINT", "groups whose first take it is"),
        "annotations": Column("BIGINT", "late facts that it used"),
        "offset": Column("BIGINT", "in the ledger"),
    },
    "trained": {
        "trajectory": Column("VARCHAR", "the trained trajectory"),
        "step": Column("BIGINT", "step that trained it"),
        "update": Column("BIGINT", "optimiser update within the step, from 0"),
        "micro_batch": Column("BIGINT", "number of the take in the update"),
        "term": Column("BIGINT", "term of the trainer that wrote the take"),
        "taken": Column("TIMESTAMP WITH TIME ZONE", "when the log took the take"),
        "partition": Column("BIGINT", "place of the completion used in `trajectories`"),
        "offset": Column("BIGINT", "place of the completion used in its partition"),
        "hash": Column("VARCHAR", "of the completion used"),
    },
    "steps": {
        "step": Column("BIGINT", "number, from 1"),
        "term": Column("BIGINT", "term of the trainer that made it"),
        "done": Column("TIMESTAMP WITH TIME ZONE", "end of the step, by the trainer's clock"),
        "version": Column("BIGINT", "number of the version published"),
        "takes": Column("BIGINT", "micro-batches"),
        **_figures("step", *STEP_FIGURES),
        "metrics": Column("MAP(VARCHAR, DOUBLE)", "all figures of the step by name"),
        "counts": Column("MAP(VARCHAR, BIGINT)", "all counts of the step by name"),
        "state_hash": Column(
            "VARCHAR", "of fp32 weights and optimiser; empty where only the weights are hashed"
        ),
    },
    "groups": {
        "group": Column("BIGINT", "place of its prompt in the seeded order"),
        "wave": Column("BIGINT", "its wave: as many admitted groups as one step trains"),
        "trajectories": Column("BIGINT", "its samples, released ones included"),
        "needed": Column("BIGINT", "how many must end alive", "0.2.0"),
        "released": Column(
            "BIGINT", "samples released by `task.redundancy`, of a trained group", "0.2.0"
        ),
        "admitted": Column("TIMESTAMP WITH TIME ZONE", "when the log took the admission"),
        "ended": Column("VARCHAR", "`trained`, `filtered`, `expired`, `dead` or `open`"),
        "detail": Column("VARCHAR", "why it was closed"),
        "step": Column("BIGINT", "step that trained or closed it"),
        "ended_at": Column("TIMESTAMP WITH TIME ZONE", "when the log took the ending"),
        "seconds": Column("DOUBLE", "from admission to ending"),
        "deadline_s": Column("DOUBLE", "seconds from admission"),
    },
    "spans": {
        "trajectory": Column("VARCHAR", "whose span it is"),
        "group": Column("BIGINT", "its group"),
        "start": Column("BIGINT", "first generated token of the span, from 0"),
        "end": Column("BIGINT", "first generated token after it"),
        "tokens": Column("BIGINT", "generated tokens of the span"),
        "version": Column("BIGINT", "number of the version that generated them"),
        "term": Column("BIGINT", "term of that version"),
        "rollout": Column("VARCHAR", "the rollout that finished the trajectory"),
        "lag_finish": Column(
            "BIGINT",
            "steps that the version was behind the newest one known to the rollout at the finish",
        ),
        "lag_consumed": Column(
            "BIGINT",
            "steps that the version was behind the trainer's when the span was trained; null:"
            " not trained",
        ),
        "step": Column("BIGINT", "step that trained the trajectory; null: none"),
        "masked": Column(
            "BOOLEAN",
            "whether the lag is above `max_lag`; null: not trained, or no `max_lag` known",
        ),
        "abandoned": Column(
            "BIGINT", "tokens of an episode's abandoned turns, which are not trained", "0.2.0"
        ),
    },
    "lag": {
        "step": Column("BIGINT", "step that trained the tokens"),
        "lag": Column("BIGINT", "steps that their version was behind the trainer's"),
        "tokens": Column("BIGINT", "trained tokens, so not masked"),
        "trajectories": Column("BIGINT", "trajectories that these tokens are of"),
    },
    "drafts": {
        "trajectory": Column("VARCHAR", "name, unique in the run"),
        "group": Column("BIGINT", "its group"),
        "index": Column("BIGINT", "which sample of the group"),
        "task": Column("VARCHAR", "task of its prompt"),
        "pass": Column("BIGINT", "pass over its prompt, from 1, of those that were drafted"),
        "tokens": Column("BIGINT", "generated tokens"),
        "steps": Column("BIGINT", "forward passes that generated them"),
        "guessed": Column("BIGINT", "draft tokens proposed"),
        "accepted": Column("BIGINT", "draft tokens accepted"),
        "asked": Column("BIGINT", "look-ups for a draft"),
        "found": Column("BIGINT", "look-ups that returned a draft"),
        "lookup_s": Column("DOUBLE", "seconds spent in look-ups"),
    },
    "episodes": {
        "trajectory": Column("VARCHAR", "name, unique in the run", "0.2.0"),
        "group": Column("BIGINT", "its group", "0.2.0"),
        "index": Column("BIGINT", "which sample of the group", "0.2.0"),
        "task": Column("VARCHAR", "task of its prompt", "0.2.0"),
        "finish": Column("VARCHAR", "`stop`, `length` or `dead`", "0.2.0"),
        "reason": Column("VARCHAR", "why it failed", "0.2.0"),
        "reward": Column("DOUBLE", "as in `rewards`", "0.2.0"),
        "turns": Column("BIGINT", "number of turns", "0.2.0"),
        "branches": Column("BIGINT", "turns that began a branch", "0.2.0"),
        "abandoned": Column(
            "BIGINT",
            "turns that are not trained, because only an earlier start of the program reached them",
            "0.2.0",
        ),
        "waiting_s": Column("DOUBLE", "seconds between turns: its program and tools", "0.2.0"),
        "generating_s": Column("DOUBLE", "seconds from request to answer", "0.2.0"),
        "tokens": Column("BIGINT", "generated tokens", "0.2.0"),
        "seconds": Column("DOUBLE", "from start to finish", "0.2.0"),
        "rollout": Column("VARCHAR", "the rollout that finished it", "0.2.0"),
        "attempt": Column("BIGINT", "of the trajectory, from 1", "0.2.0"),
    },
    "turns": {
        "trajectory": Column("VARCHAR", "whose turn it is", "0.2.0"),
        "group": Column("BIGINT", "its group", "0.2.0"),
        "turn": Column("BIGINT", "number in the episode, from 1", "0.2.0"),
        "finish": Column("VARCHAR", "how the turn ended", "0.2.0"),
        "fork": Column("VARCHAR", "the cause, if it began a branch", "0.2.0"),
        "prompt_tokens": Column("BIGINT", "new prompt tokens", "0.2.0"),
        "tokens": Column("BIGINT", "generated tokens", "0.2.0"),
        "waiting_s": Column("DOUBLE", "seconds since the turn before", "0.2.0"),
        "generating_s": Column("DOUBLE", "seconds from request to answer", "0.2.0"),
        "overridden": Column("VARCHAR[]", "parameters that the client asked otherwise", "0.2.0"),
        "digest": Column("VARCHAR", "hash of the request", "0.2.0"),
        "abandoned": Column(
            "BOOLEAN",
            "whether only an earlier start of the program reached it: not trained",
            "0.2.0",
        ),
    },
    "fates": {
        "trajectory": Column("VARCHAR", "name, unique in the run", "0.2.0"),
        "group": Column("BIGINT", "its group", "0.2.0"),
        "wave": Column("BIGINT", "wave of its group", "0.2.0"),
        "task": Column("VARCHAR", "task of its prompt", "0.2.0"),
        "fate": Column(
            "VARCHAR",
            "`trained`; `filtered` with its group; `dropped` for its lag or at a deadline; "
            "`released` by redundancy; `dead`; `open`",
            "0.2.0",
        ),
        "finished": Column("BOOLEAN", "whether it ended alive", "0.2.0"),
        "finish": Column("VARCHAR", "`stop`, `length` or `dead`", "0.2.0"),
        "tokens": Column("BIGINT", "generated tokens", "0.2.0"),
        "tokens_trained": Column("BIGINT", "generated tokens that were not masked", "0.2.0"),
        "reward": Column("DOUBLE", "as in `rewards`", "0.2.0"),
        "step": Column("BIGINT", "step that trained it", "0.2.0"),
        "prompt_length": Column(
            "DOUBLE", "mean generated tokens of its group's finished trajectories", "0.2.0"
        ),
        "difficulty": Column(
            "DOUBLE", "1 minus the mean reward of its group's finished trajectories", "0.2.0"
        ),
    },
    "bias": {
        "measure": Column("VARCHAR", "`length`, `prompt_length` or `difficulty`", "0.2.0"),
        "quantile": Column("DOUBLE", ".1, .25, .5, .75 or .9", "0.2.0"),
        "admitted": Column("DOUBLE", "its value among all admitted trajectories", "0.2.0"),
        "finished": Column("DOUBLE", "among those that ended alive", "0.2.0"),
        "trained": Column("DOUBLE", "among those that were trained", "0.2.0"),
        "dropped": Column("DOUBLE", "among those dropped for lag or at a deadline", "0.2.0"),
        "filtered": Column("DOUBLE", "among those of filtered groups", "0.2.0"),
    },
    "pass_at_k": {
        "source": Column("VARCHAR", "`training` or `held_out`", "0.2.0"),
        "step": Column("BIGINT", "the wave's step, or the evaluated version", "0.2.0"),
        "k": Column("BIGINT", "a power of 2", "0.2.0"),
        "prompts": Column("BIGINT", "prompts with k answers or more", "0.2.0"),
        "estimate": Column("DOUBLE", "unbiased estimate of Chen et al. 2021", "0.2.0"),
        "error": Column("DOUBLE", "its standard error over prompts", "0.2.0"),
    },
}


def _of_topic(fields: Mapping[str, Column]) -> Mapping[str, Column]:
    return {**ENVELOPE, **fields, **FOLDERS}


COLUMNS: Mapping[str, Mapping[str, Column]] = {
    **{topic: _of_topic(fields) for topic, fields in TOPICS.items()},
    "completions": _of_topic(TOPICS["trajectories"]),
    **DERIVED,
}
