"""Answers `audit`: runs the audit of a run once in a thread of its own, over the whole log. No
verdict is stored in the run.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.report_json import audit_report_json
from rollstream.errors import RollstreamError
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.look.index.audit_policy import audit_policy
from rollstream.look.query.looking import open_run_view


class RunVerdict:
    """The state of one run's audit; `ended` is called when it ends."""

    def __init__(self, run: ExploredRun, ended: Callable[[], None]) -> None:
        self._run, self._ended = run, ended
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._answer: dict[str, Any] = {"state": "running", "reading": ""}

    def show(self) -> dict[str, Any]:
        """Answers `audit`; the first call starts it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._check, name="audit", daemon=True)
                self._thread.start()
            return self._answer

    def wait(self, seconds: float) -> dict[str, Any]:
        self.show()
        if self._thread is not None:
            self._thread.join(seconds)
        return self.show()

    def _check(self) -> None:
        started = time.monotonic()
        try:
            answer = self._report()
        except RollstreamError as error:
            answer = {"state": "failed", "message": str(error)}
        except Exception as error:  # noqa: BLE001  the page must not wait for ever
            answer = {"state": "failed", "message": f"{type(error).__name__}: {error}"}
        seconds = round(time.monotonic() - started, 3)
        with self._lock:
            self._answer = answer | {"seconds": seconds, "at_s": time.time()}
        self._ended()

    def _report(self) -> dict[str, Any]:
        location = self._run.location
        if location.is_replay:
            return {"state": "failed", "message": "a replay is not audited; audit the replayed run"}
        if isinstance(location, SimulatedLocation):
            return {"state": "failed", "message": "a simulated run has no records to audit"}
        with open_run_view(location) as view:
            policy = audit_policy(location, view.store)
            audit = Audit(view.bus, view.store, view.run, policy, self._tell)
            results = audit.check()
            report = audit_report_json(location.name, audit, results)
        del report["place"]
        return {"state": "done", **report}

    def _tell(self, reading: str) -> None:
        with self._lock:
            self._answer = {"state": "running", "reading": reading}
