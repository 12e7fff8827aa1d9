"""Reads an endpoint as Prometheus and a health check do."""

import json
import urllib.error
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rollstream.http_proxies import open_direct
from rollstream.run.metrics.endpoint import endpoint_file

Series = dict[str, list[tuple[dict[str, str], float]]]


def get(url: str) -> tuple[int, str]:
    try:
        with open_direct(url, 20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def endpoint(folder: Path, name: str) -> dict[str, Any]:
    return json.loads(endpoint_file(folder, name).read_text())


def scrape(url: str) -> Series:
    """Samples by their full name."""
    status, text = get(f"{url}/metrics")
    assert status == 200
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(series: Series, name: str, /, **labels: str) -> float:
    """The one sample of this name with these labels among its own."""
    fitting = [v for given, v in series[name] if labels.items() <= given.items()]
    assert len(fitting) == 1, f"{name}{labels}: {series[name]}"
    return fitting[0]
