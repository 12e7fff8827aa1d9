"""vLLM as a rollout engine; importing this imports nothing of vLLM."""

from rollstream.producers.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
