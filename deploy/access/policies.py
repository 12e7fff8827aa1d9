"""Who may write what, from `rights.json`: ACLs of Kafka (`acls`), policies of a role's account at
AWS (`iam_policy`), and the policy of a bucket whose accounts are named like the roles
(`bucket_policy`). Nothing is sent; `grant.py` grants it.

    python deploy/access/policies.py ROLE BUCKET [PREFIX]        print the IAM policy of a role
    python deploy/access/policies.py everything BUCKET [PREFIX]  of one account for all roles
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RIGHTS: Mapping[str, Mapping[str, list[str]]] = json.loads(
    Path(__file__).with_name("rights.json").read_text()
)
EVERY_PUT, EVERY_DELETE = ["run.json", "probes/*"], ["probes/*"]
"""Of roles: the run's identity, which the first creates, and the probe at the start."""
READER = "look"  # of commands that read, which do neither
READ_GROUPS = ("truncated.", "dispatch.", "archive.")  # positions that many roles look up
Acl = tuple[str, str, str, str, bool]
"""(user, `TOPIC`, `GROUP` or `CLUSTER`, name, operation, whether the name is a prefix)."""


def acls(prefix: str) -> list[Acl]:
    """Returns what each role's user may do with the topics and groups of the run `prefix`."""
    found: list[Acl] = []
    for user, rights in RIGHTS.items():
        found += [(user, "CLUSTER", "kafka-cluster", "DESCRIBE", False)]  # how many brokers
        found += [(user, "TOPIC", f"{prefix}.", "DESCRIBE_CONFIGS", True)]
        found += [(user, "TOPIC", f"{prefix}.", "DESCRIBE", True)]
        found += [(user, "GROUP", f"{prefix}.{group}", "DESCRIBE", True) for group in READ_GROUPS]
        for right, operation in (("reads", "READ"), ("writes", "WRITE"), ("truncates", "DELETE")):
            for topic in rights[right]:
                name = "" if topic == "*" else topic
                found.append((user, "TOPIC", f"{prefix}.{name}", operation, not name))
        found += [(user, "GROUP", f"{prefix}.{group}", "READ", True) for group in rights["groups"]]
    return found


def iam_policy(role: str, bucket: str, prefix: str) -> dict[str, Any]:
    """Returns the policy for the account of a role, or of `everything`, over a run's prefix."""
    if role == "everything":
        puts = deletes = ["*"]
    else:
        puts, deletes = RIGHTS[role]["puts"], RIGHTS[role]["deletes"]
        if role != READER:
            puts, deletes = [*EVERY_PUT, *puts], [*EVERY_DELETE, *deletes]
    statements = [*_reads(bucket, prefix), *_writes(bucket, prefix, puts, deletes)]
    return {"Version": "2012-10-17", "Statement": statements}


def bucket_policy(bucket: str, prefix: str) -> dict[str, Any]:
    """Returns the policy of a bucket at a server whose accounts are named like the roles. It is
    short, because VersityGW keeps it in an attribute of a file, which may have 4 KB.
    """
    writers = [role for role in RIGHTS if role != READER]
    granted = [(list(RIGHTS), _reads(bucket, prefix))]
    granted += [(writers, _writes(bucket, prefix, EVERY_PUT, EVERY_DELETE))]
    granted += [
        ([role], _writes(bucket, prefix, own["puts"], own["deletes"]))
        for role, own in RIGHTS.items()
    ]
    statements = [
        {**statement, "Principal": roles} for roles, found in granted for statement in found
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def _reads(bucket: str, prefix: str) -> list[dict[str, Any]]:
    """`s3:ListBucket` has no condition: a request that finds no object names no prefix."""
    return [
        _allow(["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"]),
        _allow(["s3:GetObject"], _below(bucket, prefix, ["*"])),
    ]


def _writes(bucket: str, prefix: str, puts: list[str], deletes: list[str]) -> list[dict[str, Any]]:
    given = ((["s3:PutObject", "s3:AbortMultipartUpload"], puts), (["s3:DeleteObject"], deletes))
    return [_allow(actions, _below(bucket, prefix, keys)) for actions, keys in given if keys]


def _below(bucket: str, prefix: str, keys: Iterable[str]) -> list[str]:
    folder = f"{prefix}/" if prefix else ""
    return [f"arn:aws:s3:::{bucket}/{folder}{key}" for key in keys]


def _allow(actions: list[str], resources: list[str]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resources}


def main(role: str, bucket: str, prefix: str = "") -> int:
    if role not in (*RIGHTS, "everything"):
        print(f"{role}: no such role; known are everything, {', '.join(RIGHTS)}", file=sys.stderr)
        return 2
    print(json.dumps(iam_policy(role, bucket, prefix), indent=2))
    return 0


def _arguments() -> dict[str, str]:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("role", metavar="ROLE")
    parser.add_argument("bucket", metavar="BUCKET")
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="")
    return vars(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main(**_arguments()))
