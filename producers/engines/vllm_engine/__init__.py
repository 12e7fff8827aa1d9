"""vLLM as a rollout engine; importing this imports nothing of vLLM."""

from producers.engines.vllm_engine.engine import VllmEngine

__all__ = ["VllmEngine"]
