from typing import Any

expand_batch_to_tokens: Any

def __getattr__(name: str) -> Any: ...
