"""All hostile cases (`CASES`), by name."""

from testbed.hostile_runs import foreign_code, foreign_places, linked, odd_contents
from testbed.hostile_runs.case import Case

CASES: tuple[Case, ...] = (
    Case("healthy run", lambda scene, hosts: None),
    Case("healthy archive", lambda scene, hosts: None, "archive"),
    Case("healthy backup", lambda scene, hosts: None, "backup"),
    *linked.cases(),
    *foreign_code.cases(),
    *foreign_places.cases(),
    *odd_contents.cases(),
)
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases have one name"
