"""Which tokens of episodes are trained: none that the engine did not sample (`agents_drift`), also
with a tokenizer whose texts tokenize in many ways, and each once, at the cost of about the longest
path (`agents_trained_tokens`).

The model writes random tokens of a BPE tokenizer that is trained here, the worst case for a history
of texts: the control counts the tokens that such a history would train in place of the sampled
ones.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.case import Case, alone
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample, sample_of
from rollstream.consumers.trainer.learn.forward import policy_scorer
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, path_rows, token_rows
from rollstream.producers.agents.chat_format import TemplateChat
from rollstream.producers.dialogue.text_tokenizer import (
    CHAT_TEMPLATE,
    END,
    NAMES,
    SPECIAL,
    TextTokenizer,
)
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Emission, Engine
from rollstream.producers.engines.options import EngineOptions
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GENERATED, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling, Version
from testbed.agents.rollout import CONTEXT, agent_rollout, assignment, letter_model
from testbed.waiting import wait_for

WORDS = 600  # tokens of the vocabulary
ANSWER = 60  # tokens of an answer on average: 16 turns fill about half of the context
SLOTS, TURNS = 64, 16


class EmissionLog:
    """Keeps the tokens that the engine emitted, by trajectory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.emitted: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def poll(self, deadline_s: float) -> list[Emission]:
        found = self._engine.poll(deadline_s)
        for each in found:
            self.emitted.setdefault(each.trajectory, []).append(each.tokens)
        return found


def bpe_tokenizer(folder: Path, texts: Sequence[str]) -> TextTokenizer:
    """Trains a byte-level BPE tokenizer on the texts and saves it in the folder."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(texts, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=made, **NAMES)
    whole.chat_template = CHAT_TEMPLATE
    whole.save_pretrained(str(folder))  # pyright: ignore[reportUnknownMemberType]
    return TextTokenizer(folder)


def cases(quick: bool) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        records, log, tokenizer, model = _episodes(Path(folder), 30_000 if quick else 1_000_000)
        yield _drift(records, log, tokenizer, model)
        yield _cost(records)


def _episodes(
    folder: Path, tokens: int
) -> tuple[list[Trajectory], EmissionLog, TextTokenizer, Any]:
    """Returns the records of episodes with this many generated tokens in all, or a few more."""
    docs = Path(__file__).parents[2] / "docs"
    texts = [page.read_text() for page in sorted(docs.rglob("*.md"))[:20]]
    tokenizer = bpe_tokenizer(folder / "tokenizer", texts)
    end = tokenizer.encode(END)[0]
    words = [token for token in range(len(SPECIAL), tokenizer.size) if token != end]
    model = letter_model(words, end, tokenizer.size, ANSWER)
    engine = open_engine(
        "torch", model.config, model.state_dict(), Version(0, 1),
        EngineOptions(slots=SLOTS, context_max=CONTEXT),
    )  # fmt: skip
    log = EmissionLog(engine)
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue(1))
    sampling = Sampling(tokens_max=CONTEXT, stop=(end,))
    with agent_rollout(bus, engine=log, chat=TemplateChat(tokenizer, "hermes")) as rollout:
        asking = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.agents.talking", rollout.url, str(TURNS)]
        )
        number = 0
        while sum(len(record.logprobs) for record in rollout.done) < tokens:
            while len(rollout.agents) < SLOTS:
                rollout.assign(assignment(f"{number}.0", sampling=sampling))
                number += 1
            done = len(rollout.done)
            wait_for(lambda done=done: rollout.failures or len(rollout.done) > done, asking)
        asking.kill()
        asking.wait()
        records = list(rollout.done)
    bus.close()
    return records, log, tokenizer, model


def _drift(
    records: Sequence[Trajectory], log: EmissionLog, tokenizer: TextTokenizer, model: Any
) -> Case:
    differing = trained = control = refused = 0
    for record in records:
        refused += refusal(record, TrainingBounds(context_max=CONTEXT)) is not None
        kept = record.tokens[record.sources == GENERATED]
        sampled = np.concatenate(log.emitted[record.trajectory])[: len(kept)]
        trained += len(kept)
        differing += int(np.count_nonzero(kept != sampled)) + abs(len(kept) - len(sampled))
        for turn in record.turns:
            answer = record.tokens[turn.generated : turn.end - 1].tolist()
            again = tokenizer.encode(tokenizer.decode(answer))
            control += len(again) if again != answer else 0
    worst = _largest_gap(model, records[: max(1, len(records) // 10)])
    forks = sum(len(record.branches) for record in records)
    note = f"of {trained} trained tokens in {len(records)} episodes, {forks} forks, "
    note += f"{refused} refused; max |log π − log μ| {worst:.1e} at lag 0; "
    note += f"a history of texts would train {control} tokens that were not sampled"
    wrong = differing + refused + (worst >= 1e-4)
    return alone("agents_drift", wrong, "tokens", at_most=0, note=note)


def _largest_gap(model: Any, records: Sequence[Trajectory]) -> float:
    """Returns the largest difference of the trainer's log-probabilities from the recorded ones."""
    settings = TrainerSettings()
    scorer = policy_scorer(
        model, False, settings.gradient_checkpointing, settings.varlen_attention, settings.compile
    )
    worst = 0.0
    for record in records:
        sample: list[Sample] = [sample_of(record, 1.0)]
        scores = scorer(token_rows(sample))
        gap = scores.logprobs.detach() - loss_inputs(sample, 0).behaviour
        worst = max(worst, float(gap.abs().max()))
    return worst


def _cost(records: Sequence[Trajectory]) -> Case:
    rows = [[len(row.tokens) for row in path_rows(sample_of(record, 1.0))] for record in records]
    ratio = sum(map(sum, rows)) / sum(map(max, rows))
    steps = [sum(turn.end for turn in record.turns) / record.turns[-1].end for record in records]
    turns = sum(len(record.turns) for record in records) / len(records)
    each = sum(steps) / len(steps)
    note = f"{turns:.0f} turns an episode; a row for each turn would cost {each:.1f}"
    return alone("agents_trained_tokens", ratio, "× longest path", at_most=1.05, note=note)
