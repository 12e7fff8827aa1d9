"""Waits for the end of a run and serves its report by HTTP: the folder of a run in containers is a
volume, which a browser cannot open. The page is public to everyone who reaches the address: bind it
to loopback, or publish it there.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollstream.errors import ConfigurationError, StoreError
from rollstream.http_server import BoundedServer
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import open_run_store
from rollstream.os_failures import explain_os_error
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.metrics.endpoint import TEXT, PageResponse, serve_pages
from rollstream.run.roles.completion import POLL_S, is_complete
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.foreign_text import PORT_MAX, whole_number

# Longest wait for the last evaluation once the last step is done, as the supervisor's.
EVALUATION_S = 180.0
HTML = "text/html; charset=utf-8"


@dataclass(slots=True)
class ReportPages:
    """Answers the page in `path` once `is_written`, before that 503 and the run's progress, in any
    thread.
    """

    path: Path
    steps: int
    step: int = 0
    is_written: bool = False

    def report(self, accept: str) -> PageResponse:
        if self.is_written:
            return 200, HTML, self.path.read_bytes()
        text = f"step {self.step} of {self.steps}; the report is here once the run is complete\n"
        return 503, TEXT, text.encode()

    def health(self, accept: str) -> PageResponse:
        return 200, TEXT, b"ok\n"


def parse_address(text: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT`, or of `PORT` on 127.0.0.1. Raises `ConfigurationError`
    for another text.
    """
    host, _, digits = text.rpartition(":")
    port = whole_number(digits)
    if port is None or port > PORT_MAX:
        raise ConfigurationError(f"--serve {text!r}: write HOST:PORT, e.g. 127.0.0.1:7462")
    return host.strip("[]") or "127.0.0.1", port


def serve_report(address: tuple[str, int], pages: ReportPages) -> BoundedServer:
    """Serves the report at `/` and `/report.html`, and `/healthz`. Raises `ConfigurationError` if
    the address is unavailable.
    """
    paths = {"/": pages.report, "/report.html": pages.report, "/healthz": pages.health}
    try:
        return serve_pages(*address, paths)
    except OSError as error:
        raise ConfigurationError(
            f"--serve {address[0]}:{address[1]}: {explain_os_error(error)}"
        ) from None


def wait_until_over(
    folder: RunFolder,
    stop: threading.Event,
    on_step: Callable[[int], None] = lambda step: None,
    pause_s: float = POLL_S,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until the run is complete and its last version is evaluated (at most `EVALUATION_S`);
    returns False if `stop` is set first. `on_step` receives the newest version.
    """
    configuration = load_for_viewing(folder.configuration)
    location = locate_run(str(folder.path))
    # The run has not begun.
    while not location.has_store:
        if stop.wait(pause_s):
            return False
    store = open_run_store(location)
    complete_s: float | None = None
    while True:
        # The store is asked again.
        with suppress(StoreError):
            pointer = believed_pointer(store)
            if pointer is not None and pointer.version is not None:
                on_step(pointer.version.number)
            if complete_s is None and is_complete(store, configuration.trainer.steps):
                complete_s = clock()
        if complete_s is not None:
            is_late = clock() - complete_s > EVALUATION_S
            if is_late or _is_evaluated(configuration, folder):
                return True
        if stop.wait(pause_s):
            return False


def _is_evaluated(configuration: Configuration, folder: RunFolder) -> bool:
    if not configuration.evaluation.enabled:
        return True
    lines = read_metrics(folder.metrics / "eval.jsonl")
    return any(line["step"] >= configuration.trainer.steps for line in lines)
