"""A rollout that runs episodes of agents, without dispatch and trainer: real log, engine, endpoint
and programs, and assignments by hand (`AgentRollout`). Its model answers with random letters
(`letter_model`), so turns end by themselves.
"""

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.chat_format import ChatFormat, chat_format
from rollstream.producers.agents.endpoint import AgentEndpoint
from rollstream.producers.agents.episodes import TURN_S, AgentEpisodes
from rollstream.producers.agents.inbox import AgentInbox
from rollstream.producers.agents.keys import SessionKeys
from rollstream.producers.agents.programs import open_programs
from rollstream.producers.agents.serving import EndpointThread, endpoint_url
from rollstream.producers.dialogue.text_tokenizer import END, TextTokenizer, byte_token
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Engine
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.sender import BackgroundSender
from rollstream.producers.rollout.turn_driver import RolloutParts
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.storage.starting_model.models import build_model
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Assignment, Partial, Trajectory
from rollstream.streams.values import Sampling, Version
from testbed.waiting import WAIT_S, wait_for

CONTEXT = 2048
LETTERS = tuple(range(ord("a"), ord("z") + 1))
SERVICE = AgentSettings(service=True)


def letter_model(
    answers: Iterable[int] = LETTERS, end: int = byte_token(END), vocabulary: int = 262,
    mean: float = 8.0,
) -> PreTrainedModel:  # fmt: skip
    """Returns a model whose answers are random tokens of `answers`, about `mean` of them, and then
    the token `end`. Their probabilities depend somewhat on the tokens before.
    """
    model = build_model(
        "Qwen3ForCausalLM",
        {
            "vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
        },
        seed=0,
    )  # fmt: skip
    state = model.state_dict()
    chosen = list(answers)
    with torch.no_grad():
        state["model.embed_tokens.weight"][:, 0] = 1.0
        # The first channel is about 4 after the norm: it adds 0, log(n / mean) or -20 to the
        # logits. The other channels are small and depend on the tokens before.
        head = state["lm_head.weight"]
        head.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(0))
        head[:, 0] = -5.0
        head[chosen, 0] = 0.0
        head[end, 0] = float(np.log(len(chosen) / mean)) / 4
    return model


@dataclass
class AgentRollout:
    """One rollout of episodes on this bus, in a thread of its own."""

    bus: Bus
    settings: AgentSettings = SERVICE
    name: str = "rollout-0"
    term: int = 1
    context: int = CONTEXT
    secret: bytes = b"0123456789abcdef"
    task: TaskSettings = field(default_factory=lambda: TaskSettings(retries=0))
    chat: ChatFormat = field(default_factory=lambda: letters_format())
    engine: Engine | None = None
    done: list[Trajectory] = field(default_factory=list[Trajectory])
    agents: AgentEpisodes = field(init=False)
    in_progress: InProgress = field(init=False)
    endpoint: EndpointThread = field(init=False)
    _stop: threading.Event = field(default_factory=threading.Event)
    _loop: threading.Thread = field(init=False)
    _orders: list[Any] = field(default_factory=list[Any])
    failures: list[BaseException] = field(default_factory=list[BaseException])

    def start(self) -> "AgentRollout":
        model = letter_model()
        engine = self.engine or open_engine(
            "torch", model.config, model.state_dict(), Version(0, 1),
            EngineOptions(slots=8, context_max=CONTEXT, emit_every=4),
        )  # fmt: skip
        rollouts = RolloutSettings(slots=8, context_max=self.context)
        publisher = RolloutPublisher(
            self.bus, BackgroundSender(self.bus), self.name, self.term, rollouts,
            StatusSchedule(1.0),
        )  # fmt: skip
        judging = Judging(
            RewardPool(self.task),
            self.term,
            lambda: engine.version,
            late=self.task.reward == "late",
        )
        settings = self.settings.model_copy(update={"setup_s": WAIT_S})  # on a busy machine, too
        self.agents = AgentEpisodes(
            RolloutParts(engine, judging, publisher, rollouts),
            settings, self.chat, SessionKeys(self.secret),
            open_programs(self.settings, self.task),
            AgentInbox(),
            self.task.retries,
            prompt_text=lambda running: self.chat.user_text(running.assignment.tokens.tolist()),
            system_text=lambda running: self.chat.system_text(running.assignment.tokens.tolist()),
        )  # fmt: skip
        self.endpoint = EndpointThread(
            AgentEndpoint(self.agents, "letters", self.context).app(), self.settings.endpoint
        )
        self.agents.url = endpoint_url(self.settings.endpoint, self.endpoint.port)
        self.in_progress = InProgress(self.agents)
        self.endpoint.start()
        self._engine = engine
        self._loop = threading.Thread(target=self._guarded, daemon=True)
        self._loop.start()
        return self

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failures.append(error)
            raise

    def _run(self) -> None:
        while not self._stop.is_set():
            while self._orders:
                self._orders.pop(0)()
            self.agents.accept()
            if self.agents.running:
                for emission in self._engine.poll(TURN_S):
                    self.agents.grow(emission)
            else:
                self.agents.inbox.wait(0.005)
            self.in_progress.collect_outcomes()
            self.done += self.in_progress.done
            self.in_progress.publish()

    def in_loop(self, call: Any) -> None:
        """Call in the rollout's loop, before its next iteration."""
        self._orders.append(call)

    def assign(self, order: Assignment) -> None:
        """Give the order to the loop; returns once it was taken. A resumed episode that its program
        has ended is not open then.
        """
        taken = threading.Event()

        def take() -> None:
            self.in_progress.start(order)
            taken.set()

        self.in_loop(take)
        wait_for(lambda: self.failures or taken.is_set())

    def key(self, trajectory: str = "0.0") -> str:
        return self.agents.open[trajectory].key

    def finished(self) -> list[Trajectory]:
        """Returns the finished episodes, once there is one."""
        wait_for(lambda: self.failures or self.done)
        assert not self.failures, self.failures
        return self.done

    @property
    def url(self) -> str:
        return self.agents.url

    def _end_loop(self) -> None:
        self._stop.set()
        self._loop.join()

    def kill(self) -> None:
        """End as `kill -9` does: nothing more is written."""
        self._end_loop()
        self.endpoint.close()

    def end(self) -> None:
        self._end_loop()  # it reads the pipes of the programs, which are closed next
        self.agents.close()
        self.endpoint.close()
        self.agents.parts.judging.rewards.close()


def letters_format() -> ChatFormat:
    """Returns the chat of the built-in tokenizer."""

    class _Task:
        def tokenizer(self) -> TextTokenizer:
            return TextTokenizer(None)

    return chat_format(_Task())  # pyright: ignore[reportArgumentType]


def assignment(trajectory: str = "0.0", tokens_max: int = 4000, **changed: Any) -> Assignment:
    """Returns the order to start this episode."""
    group, _, index = trajectory.partition(".")
    fields: dict[str, Any] = {
        "kind": "start", "trajectory": trajectory, "group": int(group), "index": int(index),
        "attempt": 1, "rollout": "rollout-0", "rollout_term": 1, "version": Version(0, 1),
        "task": "letters", "tokens": np.frombuffer(b"say a", np.uint8).astype(np.uint32),
        "sampling": Sampling(tokens_max=tokens_max, stop=(byte_token(END),)), "seed": 0,
        "reference": '{"answer": "a"}',
    }  # fmt: skip
    return Assignment(**(fields | changed))


def resumed(bus: Bus, order: Assignment, **changed: Any) -> Assignment:
    """Returns the order that resumes this episode from its newest partial, as dispatch would."""
    reader = TopicReader(bus, "partials", from_begin(bus, "partials"))
    found = [
        each.address
        for each in reader.read_to(bus.end("partials"))
        if isinstance(each.record, Partial) and each.record.trajectory == order.trajectory
    ]
    from msgspec.structs import replace

    return replace(
        order, kind="resume", attempt=order.attempt + 1, partial=found[-1], first=found[0],
        **changed,
    )  # fmt: skip


@contextmanager
def agent_rollout(bus: Bus, **options: Any) -> Generator[AgentRollout]:
    """A running rollout of episodes, which is ended with the block."""
    rollout = AgentRollout(bus, **options).start()
    try:
        yield rollout
    finally:
        rollout.end()
    assert not rollout.failures, rollout.failures
