"""Runs TRL's `GRPOTrainer` beside the runs of the evidence: the same warm model, prompts and order,
group size, objective, optimiser with its learning rates, and number of trained tokens, synchronous.
Generation, passes and sums are TRL's, on transformers; the random numbers of its sampling are
others. The evaluation is ours. It needs TRL, in an environment of its own from which this project
can be imported:

`python -m studies.evidence.trl_run --seeds 5`
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import torch
import xxhash
from transformers import AutoTokenizer, TrainerCallback

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn.masters import learning_rate
from rollstream.producers.tasks.base import Task
from rollstream.run.config.config import load
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import load_run_task, prompt_order, set_torch_threads
from rollstream.storage.starting_model.models import load_model
from rollstream.storage.weights.tensors import state_hash, untie
from studies.evidence.arms import TRL, WORLDS
from studies.evidence.pieces import Piece, row_of, warm_model
from studies.evidence.rows import FACTS, write_row
from studies.evidence.stepped_run import TrainedStep, held_out_evaluation
from studies.evidence_runs import SCRATCH, claimed

datasets: Any = import_module("datasets")
trl: Any = import_module("trl")

VERSIONS = ("trl", "transformers", "accelerate")
"""Packages whose versions a row has besides those of every row."""
OBJECTIVE = {
    "loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "beta": 0.0, "num_iterations": 1,
}  # fmt: skip
"""On the policy that sampled the answers this is the objective of `lag0`: the ratio is 1, so that
no bound acts; the advantage is (R − mean) / (std + 1e-4) in a group, the loss a mean over the
tokens of the step, truncated answers included.
"""


@dataclass
class Rewards:
    """The reward function of the trainer. It keeps the facts of each batch, which is a step."""

    task: Task
    steps: list[TrainedStep] = field(default_factory=list[TrainedStep])
    __name__ = "task"

    def __call__(self, completion_ids: list[list[int]], **columns: list[Any]) -> list[float]:
        pairs = zip(columns["reference"], completion_ids, strict=True)
        rewards = [self.task.judge(reference, [ids]).reward for reference, ids in pairs]
        step, count = len(self.steps) + 1, len(rewards)
        facts = [
            {
                "group": columns["group"][at], "index": at % self._samples(columns["group"]),
                "prompt": int(columns["hash"][at]), "fate": "trained",
                "finish": "stop" if completion_ids[at][-1] in self.task.stop else "length",
                "tokens": len(completion_ids[at]), "tokens_trained": len(completion_ids[at]),
                "reward": rewards[at], "step": step, "version": step - 1, "lag": 0.0,
            }
            for at in range(count)
        ]  # fmt: skip
        tokens = sum(map(len, completion_ids))
        metrics = {
            "tokens_trained": float(tokens), "reward_mean": sum(rewards) / count,
            "accuracy": sum(reward >= 1 for reward in rewards) / count, "ess": 1.0,
            "lag_consumed_mean": 0.0, "lag_consumed_max": 0.0,
        }  # fmt: skip
        self.steps.append(TrainedStep(step, metrics, (), facts, tokens))
        return rewards

    def _samples(self, groups: list[int]) -> int:
        return groups.count(groups[0])


@dataclass
class Enough(TrainerCallback):
    """Ends the training behind the wanted tokens, and keeps what TRL logs of each step."""

    rewards: Rewards
    tokens: int

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = sum(s.tokens for s in self.rewards.steps) >= self.tokens

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        logs: dict[str, float] = more["logs"]
        # Its loss is −ratio · A, ours −weight · A · log π: the gradients agree, the values do not.
        names = {"entropy": "entropy", "grad_norm": "gradient_norm"}
        found = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
        self.rewards.steps[-1].metrics.update(found)


def trl_settings(c: Configuration, folder: Path) -> Any:
    """Returns the trainer's settings that mean what ours do."""
    t, batch = c.trainer, c.trainer.groups_per_step * c.trainer.samples_per_group
    return trl.GRPOConfig(
        **OBJECTIVE, output_dir=str(folder), max_steps=t.steps, per_device_train_batch_size=batch,
        gradient_accumulation_steps=1, num_generations=t.samples_per_group,
        max_grad_norm=t.gradient_norm_max, temperature=c.sampling.temperature, top_p=1.0, top_k=0,
        max_completion_length=c.sampling.tokens_max, mask_truncated_completions=False,
        shuffle_dataset=False, seed=c.seed, use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True,
        logging_steps=1,
    )  # fmt: skip


def optimiser(model: torch.nn.Module, t: TrainerSettings) -> tuple[Any, Any]:
    """Returns AdamW and the schedule that `lag0` has. TRL's own schedules begin with a rate of 0,
    so its first step would train nothing.
    """
    adam = torch.optim.AdamW(
        model.parameters(), lr=t.lr, betas=t.betas, eps=1e-8, weight_decay=t.weight_decay
    )
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda at: learning_rate(at, t) / t.lr)


def prompts(c: Configuration, folder: Path, tokenizer: Any) -> Any:
    """Returns the data set: our prompts in our order, as text that has their tokens again."""
    order, rows = prompt_order(c, folder), list[dict[str, Any]]()
    for group in range(c.trainer.steps * c.trainer.groups_per_step):
        prompt = order.at(group)
        text = tokenizer.decode(prompt.tokens.tolist())
        text = text.removeprefix(tokenizer.bos_token or "")  # the tokenizer adds it again
        assert tokenizer(text)["input_ids"] == prompt.tokens.tolist(), text
        # The hash of the other rows' facts, as text: a column of numbers would be a signed one.
        found = str(xxhash.xxh3_64_intdigest(prompt.tokens.tobytes()))
        rows.append({"prompt": text, "reference": prompt.reference, "group": group, "hash": found})
    return datasets.Dataset.from_list(rows)


def run_trl(piece: Piece, scratch: Path) -> Path:
    """Train, evaluate and write the row; returns its path."""
    set_torch_threads(1)
    warm = warm_model(piece, scratch)
    c = load(piece.world.configuration, [*piece.settings(), f"model.path={warm}"])
    task, model = load_run_task(c, scratch), load_model(str(warm))
    tokenizer = cast("Any", AutoTokenizer.from_pretrained(str(warm)))  # pyright: ignore[reportUnknownMemberType]
    rewards = Rewards(task)
    trainer = trl.GRPOTrainer(
        model, rewards, trl_settings(c, scratch / "trl"), prompts(c, scratch, tokenizer),
        processing_class=tokenizer, callbacks=[Enough(rewards, piece.world.tokens)],
        optimizers=optimiser(model, c.trainer),
    )  # fmt: skip
    began_s = time.process_time()
    trainer.train()
    seconds = time.process_time() - began_s
    stored, _ = untie(model.state_dict())
    weights = {name: one.detach().clone() for name, one in stored.items()}
    found = held_out_evaluation(
        c, task, (model.config, weights), piece.world.prompts, piece.arm.samples
    )
    row = row_of(piece, rewards.steps, found, state_hash(weights), seconds)
    row = msgspec.structs.replace(
        row,
        settings=(*row.settings, *(f"trl.{name}={value}" for name, value in OBJECTIVE.items())),
        machine={**row.machine, **{name: version(name) for name in VERSIONS}},
    )
    facts = [fact for step in rewards.steps for fact in step.facts]
    return write_row(row, pa.Table.from_pylist(facts, schema=FACTS))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.evidence.trl_run",
        description="Make the runs of TRL that have no row yet.",
        epilog="example: python -m studies.evidence.trl_run --seeds 1",
    )
    parser.add_argument("--world", choices=WORLDS, default=next(iter(WORLDS)))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N − 1 (default 5)")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help=f"default {SCRATCH}")
    chosen = parser.parse_args(arguments)
    for seed in range(chosen.seeds):
        piece = Piece(WORLDS[chosen.world], TRL, seed)
        with claimed(piece, chosen.scratch) as is_ours:
            if is_ours and not piece.is_done():
                print(f"{piece.name}: {run_trl(piece, chosen.scratch)}", flush=True)


if __name__ == "__main__":
    main()
