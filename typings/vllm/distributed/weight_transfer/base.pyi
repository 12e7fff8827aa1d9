from typing import Any, Generic, TypeVar

_Init = TypeVar("_Init")
_Update = TypeVar("_Update")

class WeightTransferInitInfo: ...
class WeightTransferUpdateInfo: ...

class WeightTransferEngine(Generic[_Init, _Update]):
    model: Any
    model_config: Any
    def __init__(self, *args: Any, **settings: Any) -> None: ...
