"""One list of rights, deploy/access/rights.json, has all its readers: the IAM policies and the
services of the stack. (The table of docs/ is generated from it.)
"""

import json
import re
import subprocess
import sys

import yaml

from rollstream.streams.topics import catalogue
from testbed.repository import ROOT
from tests.access.policies import FILE, iam_policy, rights
from tests.access.secured import FILE as STACK

DOCS = ROOT / "docs" / "reference"


def test_rights_name_topics_of_the_catalogue_and_a_single_holders_topic_has_its_one_writer() -> (
    None
):
    names = {topic.name for topic in catalogue()}
    writers = {"prompts": "prompts", "dispatch": "dispatch", "trainer": "train"}
    for role, own in rights().items():
        assert {*own["writes"], *own["reads"], *own["truncates"]} <= {*names, "*"}, role
        for topic in catalogue():
            if topic.writer and topic.name in own["writes"]:
                assert role == writers[topic.writer], topic.name


def test_the_policy_of_one_account_is_the_one_in_the_page() -> None:
    page = (DOCS / "s3.md").read_text()
    (text, *_) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(text) == iam_policy("everything", "BUCKET", "PREFIX")


def test_the_command_prints_the_policy_of_a_role() -> None:
    line = [sys.executable, str(FILE), "rollout", "b", "runs/r"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == iam_policy("rollout", "b", "runs/r")
    puts = [one for one in json.loads(done.stdout)["Statement"] if "s3:PutObject" in one["Action"]]
    assert "arn:aws:s3:::b/runs/r/roles/rollouts/*" in puts[0]["Resource"]
    assert not [key for one in puts for key in one["Resource"] if "weights" in key]
    done = subprocess.run([*line[:2], "trainer", "b"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "train" in done.stderr


def test_every_role_of_the_stack_has_its_user_and_only_its_own_secrets() -> None:
    services = yaml.safe_load(STACK.read_text())["services"]
    users = {s["environment"]["KAFKA_USER"]: s for s in services.values() if _has_user(s)}
    assert users.keys() == rights().keys()
    for service in services.values():
        if _has_user(service):
            user = service["environment"]["KAFKA_USER"]
            assert service["volumes"] == [f"access-{user}:/run/access:ro"]


def _has_user(service: dict) -> bool:
    return "KAFKA_USER" in service.get("environment", {})
