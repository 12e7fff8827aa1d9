"""The profiles of docker-compose.yml on a real Docker daemon: scorer, relay, explorer, Prometheus
and the role `observe` do their work beside one run, repack does on the run with a long tail, and
vLLM's CPU build in an image that has it.
"""

import json
import sys

import pytest

from testbed.stack.compose import ADDED, ROLES, SERVERS, Stack, env_file, wait_until
from testbed.stack.daemon import StackDaemon
from testbed.stack.images import build
from testbed.stack.whole_run import EXPLORER, LOOK_S, PROMETHEUS, StackRun, fetched, queried
from testbed.waiting import let_pass, wait_for

pytestmark = pytest.mark.long

UP_S = 1800.0
TOKEN = "only-for-this-test-0123"
SCRAPED = {"prompts", "dispatch", "train", "rollout", "archive", "observe", "score", "relay"}
"""Roles as their metrics name them; that of evaluation has ended where the run has none."""
STEPS = "200"  # so many that Prometheus, which looks every 5 s, has seen each role at work


def test_every_profile_does_its_work_beside_one_run(daemon: StackDaemon) -> None:
    """The run of score.env, over the relay of relay.env, with explorer and Prometheus."""
    variables = {**env_file("relay"), **env_file("score")}
    variables |= {"COMPOSE_PROFILES": "", "EXPLORER_TOKEN": TOKEN}  # services are named instead
    stack = Stack(daemon, {"TRAINER__STEPS": STEPS}, variables)
    with stack.without_data():
        stack.up(*ROLES, "report", *ADDED)
        wait_until(stack, (*ROLES, *SERVERS, *ADDED), "healthy", UP_S)

        def is_scraped() -> bool:
            seen = queried(stack, "max_over_time(rollstream_role_turn_age_seconds[1h])")
            return seen.keys() >= SCRAPED

        wait_for(is_scraped, None, lambda: f"{queried(stack, 'up')}\n{stack.describe()}")

        def has_moved_bytes() -> bool:
            sent = queried(stack, "max_over_time(rollstream_relay_sent_bytes_total[1h])")
            taken = queried(stack, "max_over_time(rollstream_rollout_relay_bytes_total[1h])")
            return min(sent.get("relay", 0), taken.get("rollout", 0)) > 0

        wait_for(has_moved_bytes, None, stack.describe)
        assert_observed(stack)
        runs = json.loads(fetched(stack, f"{EXPLORER}api/runs", TOKEN))
        assert [run["name"] for run in runs["runs"]] == ["late-reward"]
        assert b"<html" in fetched(stack, EXPLORER, TOKEN).lower()
        assert b"<html" not in fetched(stack, EXPLORER).lower()
        wait_until(stack, (*ROLES, "score", "relay"), "ended", UP_S)
        StackRun(stack).wait_for_report()
        StackRun(stack).audit()  # every trained group has the scorer's annotations


def assert_observed(stack: Stack) -> None:
    """Prometheus has the rules, and the concerns of the run, which `observe` serves."""
    rules = json.loads(fetched(stack, f"{PROMETHEUS}api/v1/rules"))["data"]["groups"]
    assert sum(len(group["rules"]) for group in rules) > 20
    concerns = json.loads(fetched(stack, f"{PROMETHEUS}api/v1/series?match[]=rollstream_concern"))
    assert {one["role"] for one in concerns["data"]} == {"observe"}, concerns


def test_repack_moves_trajectories_of_the_long_tail(daemon: StackDaemon) -> None:
    """The run of longtail.env with four rollouts, a half-taught model and shorter answers, until
    the first moves: how soon a tail is long enough depends on the model's answers.
    """
    shorter = {
        "WARMUP__DOCUMENTS": "2000", "WARMUP__STEPS": "150", "SAMPLING__TOKENS_MAX": "768",
        "ROLLOUTS__CONTEXT_MAX": "896", "EVALUATION__ENABLED": "false",
    }  # fmt: skip
    stack = Stack(daemon, shorter, env_file("longtail"))
    with stack.without_data():
        stack.up("--scale", "rollout=4")
        assert len(wait_until(stack, ["rollout"], "healthy", UP_S)) == 4

        def has_moved() -> bool:
            let_pass(LOOK_S)
            is_complete = StackRun(stack).step() == sys.maxsize
            file = "/run/rollstream/metrics/moves.jsonl"
            text = stack.run("report", "sh", "-c", f"cat {file} || true")
            moved = sum(json.loads(line).get("requests", 0) for line in text.splitlines())
            assert moved or not is_complete, "the run is complete, and nothing was moved"
            return moved > 0

        wait_for(has_moved, None, stack.describe)
        StackRun(stack).audit()


def test_rollouts_generate_with_the_cpu_build_of_vllm(daemon: StackDaemon) -> None:
    """The run of vllm.env, with a short warm-up and shorter answers."""
    shorter = {
        "WARMUP__DOCUMENTS": "1000", "WARMUP__STEPS": "60", "SAMPLING__TOKENS_MAX": "128",
        "ROLLOUTS__SLOTS": "32", "TRAINER__STEPS": "3", "TRAINER__GROUPS_PER_STEP": "8",
        "EVALUATION__ENABLED": "false",
    }  # fmt: skip
    stack = Stack(daemon, shorter, env_file("vllm"))
    build(stack)
    with stack.without_data():
        stack.up()
        (rollout,) = wait_until(stack, ["rollout"], "healthy", UP_S)
        wait_for(
            lambda: "VLLM::EngineCore" in daemon.docker("top", rollout.id), None, stack.describe
        )
        wait_until(stack, ROLES, "ended", UP_S)
        StackRun(stack).wait_for_report()
        StackRun(stack).audit()
