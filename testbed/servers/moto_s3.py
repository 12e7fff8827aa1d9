"""A second, independent S3 server: moto, in a thread of this process. It checks no credentials.

S3 checks a condition and writes in one step; moto does so in two, with a thread per request. Here
each request is read completely and then served alone.
"""

import atexit
import functools
import io
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app  # pyright: ignore[reportPrivateImportUsage]
from werkzeug.serving import make_server

from testbed.servers import use

BUCKET = "rollstream"


class _OneAtATime(DomainDispatcherApplication):
    def __init__(self) -> None:
        super().__init__(create_backend_app)
        self._serving = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        whole = environ.get("wsgi.input_terminated")  # chunked: the body marks its own end
        length = -1 if whole else int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self._serving:
            return list(super().__call__(environ, start))


@functools.cache
def endpoint() -> str:
    """Address of the one server of this process, with its bucket made."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, _OneAtATime(), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    atexit.register(server.shutdown)
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "moto")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "moto")
    address = f"http://127.0.0.1:{server.server_port}"
    client = boto3.Session().client("s3", endpoint_url=address, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    use("moto", address)
    return address


def new_url(parameters: str = "") -> str:
    """The URL of an empty prefix on it."""
    more = f"&{parameters}" if parameters else ""
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}?endpoint={endpoint()}{more}"
