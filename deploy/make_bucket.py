"""Make a bucket at an S3 endpoint once it answers: `make_bucket.py NAME ENDPOINT`. One that is
there already is fine. Credentials come from the environment, as boto3 finds them.
"""

import argparse
import sys
import time

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

WAIT_S = 60.0
THERE = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}


def main(name: str, endpoint: str) -> int:
    style = Config(s3={"addressing_style": "path"})
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=style)
    give_up = time.monotonic() + WAIT_S
    while True:
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in THERE:
                raise
        except BotoCoreError as error:
            if time.monotonic() > give_up:
                print(f"{endpoint} did not answer for {WAIT_S:g} s: {error}", file=sys.stderr)
                return 1
            time.sleep(1.0)
            continue
        return 0


def _arguments() -> dict[str, str]:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("endpoint", metavar="ENDPOINT")
    return vars(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main(**_arguments()))
