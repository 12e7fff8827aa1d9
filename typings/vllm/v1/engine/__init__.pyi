from typing import Any

class EngineCoreRequestType:
    UTILITY: Any
    def __getattr__(self, name: str) -> Any: ...
