"""A real Prometheus for tests and measurements, on a free port of 127.0.0.1, stopped by its own
process id; and `promtool`, which checks rules.

This machine's programs, or those of Debian's package, which is unpacked once into `.servers`: it is
not installed, so no service starts.
"""

import functools
import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.http_proxies import open_direct
from testbed.servers import CACHE, free_ports, installing, use
from testbed.waiting import WAIT_S, wait_for

PACKAGE = "prometheus"
UNPACKED = CACHE / PACKAGE


@functools.cache
def program(name: str) -> Path:
    """Returns the path of `prometheus` or `promtool`. Raises `RuntimeError`, with the package to
    install, where it is missing and cannot be fetched.
    """
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    with installing():
        if not UNPACKED.exists():
            _fetch()
    return UNPACKED / "usr" / "bin" / name


def _fetch() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise RuntimeError(
            "the tests start a real Prometheus and `prometheus` is missing: install it (Debian: "
            "apt-get install prometheus; others: prometheus.io)"
        )
    if os.geteuid() == 0:  # a fresh machine has no list of packages
        subprocess.run(["apt-get", "update"], capture_output=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as partial:
        done = subprocess.run(
            ["apt-get", "download", PACKAGE], cwd=partial, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"`apt-get download {PACKAGE}` failed:\n{done.stderr[-4000:]}")
        (file,) = Path(partial).glob("*.deb")
        folder = Path(partial) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", str(file), str(folder)], check=True)
        folder.rename(UNPACKED)


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs `promtool` with these words."""
    line = [str(program("promtool")), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S)


class Prometheus:
    """One server with its data in a temporary folder. Use it in a `with` block."""

    def __init__(self, targets: Sequence[str], rules: Path, scrape_s: float) -> None:
        """`targets` are addresses (`host:port`), scraped as the job `rollstream`."""
        self._folder = Path(tempfile.mkdtemp(prefix="rollstream-prometheus-"))
        scrape = {"job_name": "rollstream", "static_configs": [{"targets": list(targets)}]}
        every = f"{scrape_s:g}s"
        settings = {
            "global": {"scrape_interval": every, "scrape_timeout": every},
            "rule_files": [str(rules)],
            "scrape_configs": [scrape],
        }
        (self._folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Prometheus":
        log = self._folder / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    str(program("prometheus")),
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_for(self._is_ready, self._process, lambda: log.read_text()[-4000:])
        version = self._get("status/buildinfo")["version"]
        use("Prometheus", f"{version} at {self.address}")
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def query(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Returns the series of an instant vector, each with its value."""
        found = self._get("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def firing(self) -> set[tuple[str, str]]:
        """Returns the alerts that fire: the name of each with its run."""
        labels = (one["labels"] for one in self.firing_alerts())
        return {(one["alertname"], one.get("run", "")) for one in labels}

    def firing_alerts(self) -> list[dict[str, dict[str, str]]]:
        """Returns the alerts that fire, each with its `labels` and `annotations`."""
        return [one for one in self._get("alerts")["alerts"] if one["state"] == "firing"]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with open_direct(url, 30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} {parameters}: {error.read().decode()}") from None

    def _is_ready(self) -> bool:
        try:
            with open_direct(f"http://{self.address}/-/ready", 5) as answer:
                return answer.status == 200
        except OSError:
            return False
