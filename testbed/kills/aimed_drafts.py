"""`python -m testbed.kills.aimed_drafts COMMAND …` is `testbed.kills.aimed_moves` with rollouts
that draft whether or not it pays, and that change between plain steps and drafts all the time on
the torch engine. None of it may change a token.
"""

import sys

from rollstream.producers.drafts.gate import MARGINAL, DraftGate, WindowRule
from testbed.kills import aimed_role
from testbed.kills.aimed_moves import AimedMoves
from testbed.kills.aimed_role import aim_at_history
from testbed.kills.aims import AimedGate


class RestlessGate(DraftGate):
    """Turns drafts on and off at each look, in turn."""

    def __init__(self, rule: WindowRule = MARGINAL) -> None:
        super().__init__(rule, forced=True)

    def decide(self, rows: int, now_s: float) -> bool:
        self.on = not self.on
        return self.on


def drafts_aimed(gate: AimedGate) -> None:
    aim_at_history(gate)
    import rollstream.run.roles.rollout as rollout_role  # after aimed_role wrapped it

    rollout_role.DraftGate = RestlessGate  # type: ignore[misc]


if __name__ == "__main__":
    aimed_role.AimedBus = AimedMoves  # type: ignore[misc]
    aimed_role.MODULE = "testbed.kills.aimed_drafts"
    aimed_role.aim_at_history = drafts_aimed
    sys.exit(aimed_role.main())
