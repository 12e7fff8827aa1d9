"""The image of an earlier program and the present one side by side over one run on a real Docker
daemon, over Kafka and S3: each role is rolled forward and back while the run trains (invariant 14).
That an earlier program refuses what it does not know is in tests/upgrade/test_two_programs.py.
"""

from itertools import groupby

import pytest

from testbed.stack.compose import Container, Stack, wait_until
from testbed.stack.daemon import StackDaemon
from testbed.stack.images import EARLIER, EARLIER_REVISION, make_earlier
from testbed.stack.whole_run import StackRun

pytestmark = pytest.mark.long

UP_S = 1800.0
MORE_STEPS = 10  # to the end of the run, after every role went back
SETTINGS = {
    "TRAINER__STEPS": "100000", "TRAINER__GROUPS_PER_STEP": "4",
    "TRAINER__SAMPLES_PER_GROUP": "4", "SAMPLING__TOKENS_MAX": "96",
    "WARMUP__STEPS": "60", "WARMUP__DOCUMENTS": "1000",
    "EVALUATION__ENABLED": "false", "TRAINER__LOSS": "truncated_is",
}  # fmt: skip
"""The loss is one that the earlier program knows; it does not know the default."""
ORDER = ("archive", "rollout", "prompts", "dispatch", "trainer")
"""As docs/how-to/upgrade.md replaces them."""
REVISIONS = """
from pathlib import Path
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import open_run_log_for_writing, store_url
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import Configured
folder = Path("/run/rollstream")
c = load_for_viewing(folder / "config.json")
view = LogView(open_run_log_for_writing(c, folder), open_store(store_url(c, folder)), c.run)
for one in view.topic("ledger").records():
    if isinstance(one.record, Configured):
        print(one.record.code_revision)
"""


def test_every_role_is_upgraded_and_goes_back_while_the_run_trains(daemon: StackDaemon) -> None:
    make_earlier(daemon)
    stack = Stack(daemon, SETTINGS)
    earlier = {name: as_earlier(stack, name) for name in ("warmup", *ORDER)}
    stack.changes.update(earlier)
    with stack.without_data():
        stack.up("--scale", "rollout=2", "report", *ORDER)
        wait_until(stack, ORDER, "healthy", UP_S)
        StackRun(stack).wait_for_step(2)
        for name in ORDER:
            del stack.changes[name]
            replace_one(stack, name)
        assert images(stack) == {EARLIER, "rollstream"}  # a rollout of each
        for name in reversed(ORDER):
            stack.changes[name] = earlier[name]
            replace_one(stack, name)
        assert images(stack) == {EARLIER}
        end(stack)
        found = [one for one, _ in groupby(stack.run("report", "python", "-c", REVISIONS).split())]
        assert [one == EARLIER_REVISION for one in found] == [True, False, True], found
        StackRun(stack).audit()
        stack.run("trainer", "rollstream", "audit", "/run/rollstream")  # the earlier program's


def as_earlier(stack: Stack, service: str) -> dict[str, object]:
    """The service in the earlier program, which has no option to end a role with the run."""
    words = [
        word.replace(" --until-complete", "") for word in stack.described()[service]["command"]
    ]
    return {"image": EARLIER, "command": [word for word in words if word != "--until-complete"]}


def replace_one(stack: Stack, service: str) -> None:
    """Replaces a container of the other image, and waits until two more steps are trained."""
    before = StackRun(stack).step()
    wanted = stack.changes.get(service, {}).get("image", "rollstream")
    stack.replace(next(one for one in stack.containers(service) if image(stack, one) != wanted))
    wait_until(stack, [service], "healthy", UP_S)
    StackRun(stack).wait_for_step(before + 2)


def end(stack: Stack) -> None:
    """Gives the run its last step, the trainer first, and waits until it is complete."""
    stack.settings = {**SETTINGS, "TRAINER__STEPS": str(StackRun(stack).step() + MORE_STEPS)}
    words = stack.described()["trainer"]["command"]
    stack.changes["trainer"] = {"image": EARLIER, "command": [*words, "--accept-config"]}
    stack.up("--no-deps", "trainer")
    wait_until(stack, ["trainer"], "healthy", UP_S)
    stack.up("--no-deps", "--scale", "rollout=2", "report", *ORDER[:-1])
    wait_until(stack, ["trainer"], "ended", UP_S)
    StackRun(stack).wait_for_report()


def images(stack: Stack) -> set[str]:
    return {image(stack, one) for one in stack.containers(*ORDER)}


def image(stack: Stack, container: Container) -> str:
    return stack.daemon.docker("inspect", "-f", "{{.Config.Image}}", container.id).strip()
