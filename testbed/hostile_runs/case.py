"""One hostile case (`Case`): a healthy run, archive or backup, and the function that changes it."""

from collections.abc import Callable
from dataclasses import dataclass

from testbed.hostile_runs.foreign_host import ForeignHost
from testbed.hostile_runs.scene import Scene


@dataclass(frozen=True, slots=True)
class Hosts:
    """The stranger's hosts: `plain`, and `tls` with a certificate of its own."""

    plain: ForeignHost
    tls: ForeignHost

    def __iter__(self):
        return iter((self.plain, self.tls))


Mutation = Callable[[Scene, Hosts], None]


@dataclass(frozen=True, slots=True)
class Case:
    """Names a mutation; `kind` is what is received: a `run`, an `archive` or a `backup`."""

    name: str
    mutate: Mutation
    kind: str = "run"
