"""A second, independent S3 server: moto, in a thread of this process. It checks no credentials."""

import atexit
import functools
import logging
import os
import uuid

import boto3
from moto.server import ThreadedMotoServer

from tests.servers import use

BUCKET = "rollstream"


@functools.cache
def endpoint() -> str:
    """Address of the one server of this process, with its bucket made."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    atexit.register(server.stop)
    host, port = server.get_host_and_port()
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "moto")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "moto")
    address = f"http://{host}:{port}"
    client = boto3.Session().client("s3", endpoint_url=address, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    use("moto", address)
    return address


def new_url(parameters: str = "") -> str:
    """URL of an empty place there."""
    more = f"&{parameters}" if parameters else ""
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}?endpoint={endpoint()}{more}"
