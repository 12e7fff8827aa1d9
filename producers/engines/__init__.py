"""Engines, which generate tokens for a rollout.

`base` is the contract (`Engine`), `options` are those of engines with a model, `merged_update` is
two weight updates as one, `queue` the queue of sequences under all engines with the checks that
they share. `settings` are those of rollouts with their engines (`paced_settings` is the table of
one), `kind` has the engines' names and what is known of each before it is opened (`EngineKind`).
`drafting` is what an engine knows of drafts. `torch/` is the embedded engine, `vllm/` drives vLLM
in this process, in one of its own or behind a URL, `paced/` computes no model and takes its step
times from a roofline. `randomness` has the random numbers of sampling, `roofline` the model of a
decode step's time, and `profile` measures it on a real engine.
"""
