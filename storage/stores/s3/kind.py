"""The kind of stores in a bucket (`S3Kind`). boto3, an extra, takes half a second to import."""

import os
from dataclasses import replace
from typing import Literal
from urllib.parse import urlsplit

from rollstream.errors import ConfigurationError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.kind import NamedServer
from rollstream.storage.stores.s3.address import parse_s3_url

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


class S3Kind:
    form = "s3://BUCKET/PREFIX"

    def check(self, url: str) -> None:
        parse_s3_url(url)

    def identity(self, url: str) -> str:
        parts = urlsplit(url)
        return f"s3://{parts.netloc}/{parts.path.strip('/')}"

    def named_server(self, url: str) -> NamedServer | None:
        address = parse_s3_url(url)
        if address.endpoint is None:
            if address.region is None or address.region.replace("-", "").isalnum():
                return None  # Amazon's hosts, or those of AWS_ENDPOINT_URL
            raise ConfigurationError(f"{address.region!r} is no region of AWS")
        if address.endpoint in (os.environ.get(v, "").rstrip("/") for v in ENDPOINT_VARIABLES):
            return None
        split = urlsplit(address.endpoint)
        return NamedServer(
            url=address.endpoint,
            host=f"{split.hostname}:{split.port or 443}",
            is_encrypted=split.scheme == "https",
            what="the S3 server",
            credentials="AWS",
            variable="AWS_ENDPOINT_URL",
        )

    def open(self, url: str, sync: Literal["normal", "full"], deadline_s: float) -> ObjectStore:
        del sync  # the server keeps what it acknowledged
        place = parse_s3_url(url)
        try:
            from rollstream.storage.stores.s3.store import S3Store
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"store s3://…: {error.name} is not installed; pip install 'rollstream[cloud]'"
            ) from None
        return S3Store(replace(place, deadline_s=min(place.deadline_s, deadline_s)))
