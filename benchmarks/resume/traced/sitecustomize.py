"""Counts the CPU time that a process spends in named functions. Python imports this file by itself
where its folder is on PYTHONPATH, so the product does not depend on it.

`CPU_COUNTED_IN` is the folder for the results, one JSON file a process. A call inside another
counted one counts once, as the outer one's. The clock of a process starts with the first counted
call: imports and warm-up are excluded.
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SECTIONS = {
    "rollstream.consumers.trainer.ledger": {"Ledger.append": "ledger"},
    "rollstream.consumers.trainer.learn.learner": {
        "TorchLearner.state_hash": "ledger", "TorchLearner.state": "checkpoint",
    },
    "rollstream.consumers.trainer.publisher": {
        "write_checkpoint": "checkpoint", "StepPublisher.clean_up": "checkpoint",
    },
    "rollstream.consumers.trainer.loop": {"Trainer.checkpoint_state": "checkpoint"},
    "rollstream.producers.rollout.publisher": {
        "RolloutPublisher.partials": "partials", "RolloutPublisher.give_up": "partials",
    },
    "rollstream.producers.rollout.sender": {
        "encode_each": "partials", "append_encoded": "partials",
    },
}  # fmt: skip
"""Module → function → section that it counts for."""

_found: dict[str, float] = defaultdict(float)
_calls: Counter[str] = Counter()
_within = threading.local()
_started: list[float] = []
_lock = threading.Lock()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module of SECTIONS on the usual path, and wraps its functions after loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in SECTIONS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for name, section in SECTIONS[fullname].items():
                _count(module, name, section)

        spec.loader.exec_module = exec_module
        return spec


def _count(module: ModuleType, name: str, section: str) -> None:
    *owners, last = name.split(".")
    owner: Any = getattr(module, owners[0]) if owners else module
    plain = getattr(owner, last)

    def counted(*arguments: Any, **named: Any) -> Any:
        is_of_topic = name in ("encode_each", "append_encoded")
        if getattr(_within, "any", False) or (is_of_topic and arguments[1] != "partials"):
            return plain(*arguments, **named)
        _begin()
        _within.any, started = True, time.thread_time()
        try:
            return plain(*arguments, **named)
        finally:
            _within.any, spent = False, time.thread_time() - started
            with _lock:
                _found[section] += spent
                _calls[section] += 1

    setattr(owner, last, counted)


def _begin() -> None:
    if not _started:
        _started.append(time.process_time())


def _write() -> None:
    if _started:
        spent = time.process_time() - _started[0]
        line = {"process_s": spent, "sections_s": _found, "calls": _calls, "line": sys.argv}
        path = Path(os.environ["CPU_COUNTED_IN"]) / f"{os.getpid()}.json"
        path.write_text(json.dumps(line))


if "CPU_COUNTED_IN" in os.environ:
    sys.meta_path.insert(0, _Finder())
    atexit.register(_write)
