"""Each kind of violation planted into a healthy log: audit finds it, and names the invariant and
the position. The kinds that no log shows leave audit clean, and docs/reference/audit.md names each.
"""

from pathlib import Path

import pytest

from testbed.repository import ROOT
from testbed.violations.harness import Kind, kinds, missed, unseen

KINDS = list(kinds())
DOCS = ROOT / "docs" / "reference" / "audit.md"


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_planted_violation_is_found_and_named(healthy: Path, tmp_path: Path, kind: Kind) -> None:
    assert missed(kind, healthy, tmp_path) == ""


def test_there_are_more_than_sixty_kinds() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 60


def test_what_no_log_shows_is_named_in_the_docs(healthy: Path, tmp_path: Path) -> None:
    text = DOCS.read_text()
    for name, why, results in unseen(healthy, tmp_path):
        assert [result.offenders for result in results.values() if result.offenders] == [], name
        assert name.replace("_", " ") in text, f"{name}: {why}"
