from typing import Any

class RequestOutputKind:
    CUMULATIVE: Any
    DELTA: Any
    FINAL_ONLY: Any
