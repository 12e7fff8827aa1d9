"""The queries of `deploy/grafana/dashboards/`, as Prometheus is asked."""

import json
from collections.abc import Iterator

from testbed.repository import ROOT

FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
RUN_PAGE, FLEET_PAGE = "rollstream.json", "fleet.json"


def panel_queries(page: str) -> Iterator[tuple[str, str]]:
    """Yields the title of each panel with each of its queries; `$run` stands for the chosen run."""
    for panel in json.loads((FOLDER / page).read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
