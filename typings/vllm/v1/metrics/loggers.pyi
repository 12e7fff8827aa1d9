from typing import Any

class StatLoggerBase:
    def __init__(self, *args: Any, **settings: Any) -> None: ...
