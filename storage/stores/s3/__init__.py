"""The store over an S3 bucket.

`store` implements the contract and writes objects, in one request or in parts; `read` reads them,
in parallel if they are large. `address` parses the URL. Only `client` imports boto3. `errors`
decides whether and when a failed request is retried, `advice` what to do about it.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.storage.stores.s3.address import (
        S3Address as S3Address,
        parse_s3_url as parse_s3_url,
    )
    from rollstream.storage.stores.s3.store import S3Store as S3Store

__getattr__ = lazy_exports(__name__)
