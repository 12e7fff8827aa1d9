from typing import Any

class WeightTransferEngineFactory:
    _registry: dict[str, Any]
    @classmethod
    def register_engine(cls, name: str, *where: Any) -> None: ...
