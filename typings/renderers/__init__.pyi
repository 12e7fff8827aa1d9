"""What Rollstream uses of the library renderers (producers/agents/renderer_bridge.py)."""

from typing import Any

__version__: str

class BaseRendererConfig:
    model_fields: dict[str, Any]
    def __init__(self, *, thinking_retention: str | None = None, **fields: Any) -> None: ...

def config_from_name(name: str) -> BaseRendererConfig: ...
def create_renderer(tokenizer: Any, config: BaseRendererConfig) -> object: ...
