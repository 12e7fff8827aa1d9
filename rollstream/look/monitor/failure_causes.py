"""Classifies why a trajectory died, so that counts have few names. Stage and kind are fixed words
of the rollout; the rest of a reason is text of the task's code.
"""

STAGES = ("environment", "agent", "reward", "engine")
"""A reason begins with one of these and a colon."""
_KINDS = (
    ("took longer than", "timeout"),
    ("no request within", "timeout"),
    ("no turn within", "timeout"),
    ("was not ready after", "timeout"),
    ("turns_max of", "out of turns"),
    ("tokens_max of", "out of tokens"),
    ("context of", "out of tokens"),
    ("its process ended", "crash"),
    ("exit code", "crash"),
    ("ended by", "crash"),
)
"""By the beginning of the rest of a reason."""
KINDS = ("timeout", "out of turns", "out of tokens", "crash", "error")
REFUSED = "refused"
OTHER = "other"


def failure_cause(reason: str) -> str:
    """`environment timeout`, `reward error` and the like, `refused` for a trajectory that could not
    be trained (`admissible.py`), or `other`.
    """
    if reason.startswith(REFUSED):
        return REFUSED
    stage, colon, rest = reason.partition(":")
    if not colon or stage not in STAGES:
        return OTHER
    text = rest.strip()
    kind = next((kind for start, kind in _KINDS if text.startswith(start)), "error")
    return f"{stage} {kind}"
