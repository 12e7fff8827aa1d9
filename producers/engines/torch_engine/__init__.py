"""The embedded engine: decoder-only transformers models, continuous batching, CPU and CUDA."""

from producers.engines.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
