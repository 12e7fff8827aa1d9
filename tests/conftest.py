"""Shared by all tests: threads and byte code of their processes, the end of what they start,
signals as in a terminal, seeds of Hypothesis, the model of runs, and the list of real servers used.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

# Before torch is imported, here and in every process that a test starts: two workers of pytest, and
# the roles of a run beside each other, have no core left for a second thread of theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without its byte code every process that a test starts would compile this repository again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Folders of tests stay where pytest keeps them, to be looked at, and what torch and vLLM compiled
# for the next time; other temporary files and caches end with this process.
_TEMPORARY, _CACHE = tempfile.gettempdir(), os.path.expanduser("~/.cache")
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _TEMPORARY)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{_TEMPORARY}/torchinductor_tests_{os.getuid()}")
os.environ.setdefault("VLLM_CACHE_ROOT", f"{_CACHE}/vllm")
os.environ.setdefault("HF_HOME", f"{_CACHE}/huggingface")

from testbed.servers.guard import guard, left_over  # noqa: E402

guard()
# The private folder of the user who tests, and what is known of runs there, stays out of tests.
os.environ["ROLLSTREAM_STATE"] = tempfile.mkdtemp(prefix="rollstream-test-state-")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="rollstream-test-cache-")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

from testbed.servers import used, used_elsewhere  # noqa: E402
from testbed.servers.variables import changed_since  # noqa: E402

# A shell that starts pytest in the background ignores SIGINT, and children inherit that; tests send
# it to processes of their own.
signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

# A command that lowers its priority is often called in this process, and the tests after it would
# starve beside other programs: without this line they ended at the lowest of all.
os.nice = lambda increment: os.getpriority(os.PRIO_PROCESS, 0)

# The same examples every time, so that a change is judged by itself; `make fuzz` finds new ones.
# The duration of an example shows how busy the machine is, and nothing else.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", UNTIMED, derandomize=True)
settings.register_profile("many", UNTIMED, derandomize=True)  # of `make test-slow`
settings.register_profile("fuzz", UNTIMED, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
settings.load_profile(PROFILE)
if PROFILE != "fuzz":
    # Hypothesis also draws constants of the modules that were imported so far: then which examples
    # a test gets would depend on the tests before it in this process.
    providers._get_local_constants = lambda: providers._local_constants  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that runs of `testbed.run_process` only read."""
    from testbed.run_process import random_model  # imports transformers

    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def variables_stay() -> Generator[None]:
    """Every test leaves the environment as it was, or those after it in this process fail."""
    before = dict(os.environ)
    yield
    assert changed_since(before) == []


RUN_MODULES = ("testbed.run_driver", "testbed.run_process")


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist keeps the order of files below in place of its own."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start whole runs come first: at the end workers share the short ones."""
    items.sort(key=lambda item: not starts_runs(item))


def starts_runs(item: pytest.Item) -> bool:
    names = vars(getattr(item, "module", item)).values()
    return any(getattr(name, "__module__", "") in RUN_MODULES for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """After each test signals end pytest, whatever a command that it called has installed. After
    the last test of a file none of the processes that its tests started still runs.
    """
    yield
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if nextitem is None or nextitem.path != item.path:
        processes = left_over()
        assert not processes, "\n".join([f"{item.path} leaves these running:", *processes])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the real servers, so that a run without them is not taken for one with them."""
    if used():
        terminalreporter.section("real servers used")
        for name, what in sorted(used().items()):
            terminalreporter.line(f"{name}: {what}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist passes the names of its servers on."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["servers"] = used()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Reads the servers of a worker that ended in order; one that crashed fails its tests
    anyway.
    """
    used_elsewhere(getattr(node, "workeroutput", {}).get("servers", {}))
