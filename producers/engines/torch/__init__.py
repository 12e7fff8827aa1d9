"""The embedded engine: decoder-only transformers models, continuous batching, CPU and CUDA."""

from rollstream.producers.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
