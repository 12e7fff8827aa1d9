"""The vLLM engine: NAME vllm (needs `make vllm`)."""
