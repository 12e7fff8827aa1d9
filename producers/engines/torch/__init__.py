"""The embedded engine: continuous batching of decoder-only transformers models on CPU and CUDA.

`kind` is what is known before one is opened, `engine` implements the contract, `batch` the decode
steps and `speculative` the same with drafts (`draft_verify`). `rows` has the state of each row,
`attention` (with the KV cache), `prefill` and `sampling` the parts of a step. `decoder` is the
contract of a model: `llama` with `llama_weights` computes the Llama and Qwen families, `hf_decoder`
any other model; `engine.open_decoder` chooses. `weights` loads, patches and reads back the served
weights. `adapters` serves LoRA adapters of several versions in one batch.
"""
