"""A vLLM server that others run, as a rollout's engine: its client here, and what the workers of
the server load.
"""
