"""The remainder task with a reward that needs a service, as a game day has it (`Judged`)."""

from pathlib import Path
from zlib import crc32

from rollstream.producers.tasks.base import Score, Turns
from rollstream.producers.tasks.remainder import Remainder
from testbed.waiting import let_pass

PAUSE_S = 0.4
"""What the service takes for an answer. It slows the run down, which shares its machine."""


class Judged(Remainder):
    """Rewards half of the answers of any model, by their checksum, so that a model with random
    weights raises no concern. The service is up unless the file `service` exists.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = Path(service)

    def judge(self, reference: str, turns: Turns) -> Score:
        if self.service.exists():
            raise ConnectionError("reward-service: connection refused")
        let_pass(PAUSE_S)
        return Score(float(crc32(bytes(turns[-1])) & 1))
