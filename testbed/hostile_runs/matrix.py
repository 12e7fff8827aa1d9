"""Runs calls on cases (`Matrix`): one scene for each case, built again whenever a call did harm."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from testbed.hostile_runs.calls import Call
from testbed.hostile_runs.case import Case, Hosts
from testbed.hostile_runs.foreign_host import ForeignHost
from testbed.hostile_runs.scene import Scene, make_scene, make_templates
from testbed.hostile_runs.trial import TIMEOUT_S, Attempt, RealProcesses, Runner, attempt
from testbed.hostile_runs.warm import ForkingInterpreter


class Matrix:
    """Holds the templates, the hosts and the runner in the folder `root`; with `is_warm` calls are
    forks. Use it as a context manager.
    """

    def __init__(self, root: Path, is_warm: bool, timeout_s: float = TIMEOUT_S) -> None:
        self._root, self._opened, self._timeout_s = root, ExitStack(), timeout_s
        (root / "host").mkdir(parents=True)
        (root / "home").mkdir()
        self._templates = make_templates(root / "templates")
        plain = self._opened.enter_context(ForeignHost())
        self._hosts = Hosts(plain, self._opened.enter_context(ForeignHost(root / "host")))
        self._runner: Runner = RealProcesses()
        if is_warm:
            interpreter = ForkingInterpreter(root / "home")
            self._opened.callback(interpreter.close)
            self._runner = interpreter

    def attempts(
        self, cases: Iterable[Case], calls: Iterable[Call]
    ) -> Iterator[tuple[Case, Attempt]]:
        """Yields what each call did on each case that it takes."""
        calls = tuple(calls)
        for case in cases:
            scene: Scene | None = None
            for call in calls:
                if case.kind not in call.kinds:
                    continue
                if scene is None:
                    scene = self.scene(case)
                done = self.attempt(scene, call)
                yield case, done
                if done.faults or call.writes:
                    scene = None

    def scene(self, case: Case) -> Scene:
        """Builds the scene of a case."""
        return make_scene(
            self._root / "scene",
            self._templates,
            case.kind,
            lambda scene: case.mutate(scene, self._hosts),
        )

    def attempt(self, scene: Scene, call: Call) -> Attempt:
        """Runs a call on a scene, whose output folders it empties before."""
        scene.clear_out()
        return attempt(scene, call, self._runner, self._hosts, self._timeout_s)

    def __enter__(self) -> "Matrix":
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()
