"""Makes the secrets of the stack with access rights: `make_secrets.py FOLDER`. An authority of its
own signs the certificates of both servers and of the administrator, and is thrown away; each role
gets a password of Kafka and a key of the object store, in files that its user alone reads.

    FOLDER/<role>/         ca.pem, kafka-password, aws-credentials
    FOLDER/kafka/          ca.pem, server.pem (key and certificate)
    FOLDER/object-store/   cert.pem, key.pem
    FOLDER/admin/          ca.pem, cert.pem, key.pem, passwords.json

Does nothing where it was done before. No secret is an argument of a process or printed.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from policies import RIGHTS

OWNER = 1000  # the user of the images of roles and broker
SERVERS = {"kafka": "kafka", "object-store": "object-store", "admin": "admin"}
DAYS = "3650"


def main(folder: str) -> int:
    root = Path(folder)
    if (root / "admin" / "passwords.json").exists():
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        authority = _certificate(Path(scratch), "rollstream", None)
        for name, common in SERVERS.items():
            own = Path(scratch) / name
            own.mkdir()
            key, cert = _certificate(own, common, authority)
            if name == "kafka":
                _write(root / name / "server.pem", key.read_text() + cert.read_text())
            else:
                _write(root / name / "key.pem", key.read_text())
                _write(root / name / "cert.pem", cert.read_text())
        ca = authority[1].read_text()
        for name in ("kafka", "admin", *RIGHTS):
            _write(root / name / "ca.pem", ca)
    passwords = {role: {name: secrets.token_hex(20) for name in ("kafka", "s3")} for role in RIGHTS}
    for role, own in passwords.items():
        _write(root / role / "kafka-password", own["kafka"])
        lines = ("[default]", f"aws_access_key_id = {role}")
        _write(
            root / role / "aws-credentials",
            "\n".join([*lines, f"aws_secret_access_key = {own['s3']}", ""]),
        )
    _write(root / "admin" / "passwords.json", json.dumps(passwords))  # last: it is complete
    return 0


def _certificate(
    folder: Path, common: str, authority: tuple[Path, Path] | None
) -> tuple[Path, Path]:
    """Returns the files of a new key and its certificate, by its own key or an authority's."""
    key, cert, request = folder / "key.pem", folder / "cert.pem", folder / "request.pem"
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    new += ["-subj", f"/CN={common}", "-keyout", str(key)]
    if authority is None:
        line = ["req", "-x509", *new, "-days", DAYS, "-out", str(cert)]
        _openssl(*line)
        return key, cert
    _openssl("req", *new, "-out", str(request))
    names = folder / "names"
    names.write_text(f"subjectAltName=DNS:{common},DNS:localhost,IP:127.0.0.1\n")
    line = ["x509", "-req", "-in", str(request), "-days", DAYS, "-CA", str(authority[1])]
    line += ["-CAkey", str(authority[0]), "-CAcreateserial", "-extfile", str(names)]
    _openssl(*line, "-out", str(cert))
    return key, cert


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def _write(file: Path, text: str) -> None:
    """Write a file that its user alone reads; as root, for the user of the images."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(0o600)
    file.write_text(text)
    if os.geteuid() == 0:
        for path in (file.parent, file):
            os.chown(path, OWNER, OWNER)
    file.parent.chmod(0o700)


def _arguments() -> dict[str, str]:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", metavar="FOLDER")
    return vars(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main(**_arguments()))
