"""`python -m testbed.kills.aimed_drafts COMMAND …` is `testbed.kills.aimed_moves` where rollouts
draft whether or not that pays, and on the torch engine change between plain steps and drafts all
the time: none of it may change a token.
"""

import sys

from rollstream.producers.drafts.gate import MARGINAL, DraftGate, WindowRule
from testbed.kills import aimed_role
from testbed.kills.aimed_moves import AimedMoves
from testbed.kills.aimed_role import aim_at_history
from testbed.kills.aims import AimedGate


class RestlessSwitch(DraftGate):
    """On and off in turn, at each look."""

    def __init__(self, rule: WindowRule = MARGINAL) -> None:
        super().__init__(rule, forced=True)

    def decide(self, rows: int, now_s: float) -> bool:
        self.on = not self.on
        return self.on


def drafts_aimed(gate: AimedGate) -> None:
    aim_at_history(gate)
    import rollstream.roles.rollout as rollout_role  # behind the doors, which are wrapped by now

    rollout_role.Switch = RestlessSwitch  # type: ignore[misc]


if __name__ == "__main__":
    aimed_role.AimedBus = AimedMoves  # type: ignore[misc]
    aimed_role.MODULE = "testbed.kills.aimed_drafts"
    aimed_role.aim_at_history = drafts_aimed
    sys.exit(aimed_role.main())
