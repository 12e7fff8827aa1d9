"""KV cache handed from one vLLM engine of a node to another, by shared memory, when a trajectory
moves. Whatever is not exactly right is computed anew instead; docs/vllm.md has the interleavings.
"""
