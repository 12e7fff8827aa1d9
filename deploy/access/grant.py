"""Gives each role a user at the broker and an account at the object store, with the rights of
`rights.json` and no more: `grant.py FOLDER KAFKA ENDPOINT BUCKET RUN`.

FOLDER is that of `make_secrets.py` as the administrator has it (`admin/`), KAFKA the address of the
listener that knows him by his certificate, ENDPOINT a VersityGW, whose root account is in the
environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY). The topics are created here, so no role may
create any. Done again, it changes nothing.
"""

import argparse
import hashlib
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from xml.sax.saxutils import escape

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError
from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourceType,
    UserScramCredentialUpsertion,
)
from policies import acls, bucket_policy

from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue

WAIT_S, REGION = 120.0, "us-east-1"
MECHANISM = "SCRAM-SHA-512"
THERE = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}


def main(folder: str, kafka: str, endpoint: str, bucket: str, run: str) -> int:
    own = Path(folder) / "admin"
    passwords = json.loads((own / "passwords.json").read_text())
    os.environ["AWS_CA_BUNDLE"] = str(own / "ca.pem")
    make_accounts(endpoint, {role: one["s3"] for role, one in passwords.items()})
    make_bucket(endpoint, bucket, run)
    files = {name: str(own / f"{name}.pem") for name in ("ca", "cert", "key")}
    options = "&".join(f"{name}={file}" for name, file in files.items())
    bus = open_bus(f"kafka://{kafka}/{run}?security=ssl&{options}")
    bus.create(catalogue())
    bus.close()
    admin = KafkaAdminClient(
        bootstrap_servers=[kafka],
        security_protocol="SSL",
        ssl_cafile=files["ca"],
        ssl_certfile=files["cert"],
        ssl_keyfile=files["key"],
    )
    users = [
        UserScramCredentialUpsertion(role, MECHANISM, one["kafka"])
        for role, one in passwords.items()
    ]
    refused = {user: why for user, why in admin.alter_user_scram_credentials(users).items() if why}
    rights = [
        ACL(
            f"User:{user}",
            "*",
            ACLOperation[operation],
            ACLPermissionType.ALLOW,
            ResourcePattern(
                ResourceType[kind],
                name,
                ACLResourcePatternType.PREFIXED if is_prefix else ACLResourcePatternType.LITERAL,
            ),
        )
        for user, kind, name, operation, is_prefix in acls(run)
    ]
    failed = admin.create_acls(rights)["failed"]
    admin.close()
    if refused or failed:
        print(f"the broker refused users {refused} and rights {failed}", file=sys.stderr)
        return 1
    return 0


def make_accounts(endpoint: str, secrets: dict[str, str]) -> None:
    """Make the accounts by the server's interface for administrators; those that are there stay."""
    give_up = time.monotonic() + WAIT_S
    for name, secret in secrets.items():
        body = (
            f"<Account><Access>{escape(name)}</Access><Secret>{escape(secret)}</Secret>"
            "<Role>user</Role></Account>"
        ).encode()
        while True:
            try:
                _send(f"{endpoint}/create-user", body)
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    raise RuntimeError(f"{name}: {error.read().decode()}") from None
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(1.0)
                continue
            break


def _send(url: str, body: bytes) -> None:
    root = Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    request = AWSRequest("PATCH", url, data=body)
    request.headers["X-Amz-Content-Sha256"] = hashlib.sha256(body).hexdigest()
    SigV4Auth(root, "s3", REGION).add_auth(request)
    sent = urllib.request.Request(url, body, dict(request.headers.items()), method="PATCH")
    context = ssl.create_default_context(cafile=os.environ["AWS_CA_BUNDLE"])
    with urllib.request.urlopen(sent, timeout=30, context=context):
        pass


def make_bucket(endpoint: str, bucket: str, run: str) -> None:
    style = Config(s3={"addressing_style": "path"})
    client = boto3.client("s3", endpoint_url=endpoint, region_name=REGION, config=style)
    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in THERE:
            raise
    text = json.dumps(bucket_policy(bucket, run), separators=(",", ":"))
    client.put_bucket_policy(Bucket=bucket, Policy=text)


def _arguments() -> dict[str, str]:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for name in ("folder", "kafka", "endpoint", "bucket", "run"):
        parser.add_argument(name, metavar=name.upper())
    return vars(parser.parse_args())


if __name__ == "__main__":
    try:
        sys.exit(main(**_arguments()))
    except (BotoCoreError, RuntimeError) as error:
        print(f"grant: {error}", file=sys.stderr)
        sys.exit(1)
