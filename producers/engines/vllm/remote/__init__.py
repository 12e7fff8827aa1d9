"""A vLLM server by URL as a rollout's engine: the client, and the extension that the server's
workers load.
"""
