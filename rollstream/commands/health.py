"""`rollstream health --port N`: a process's `/healthz` as an exit code, for containers."""

import argparse
import json
import sys
import urllib.error
import urllib.request

WAIT_S = 4.0


def main(arguments: argparse.Namespace) -> int:
    """0 if it is well."""
    url = f"http://127.0.0.1:{arguments.port}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            said, code = answer.read(), 0
    except urllib.error.HTTPError as refusal:
        said, code = refusal.read(), 1
    except OSError as error:
        print(f"rollstream: nobody answers on {url} ({error})", file=sys.stderr)
        return 1
    print(said.decode() if arguments.json else json.loads(said)["state"])
    return code
