from typing import Any

class LLMEngine:
    engine_core: Any
    vllm_config: Any
    @classmethod
    def from_engine_args(cls, engine_args: Any, **settings: Any) -> LLMEngine: ...
    def __getattr__(self, name: str) -> Any: ...
