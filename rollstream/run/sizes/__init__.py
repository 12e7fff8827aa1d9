"""Whether a run fits into the memory of its machines, computed before it starts.

`shapes` has the models, `devices` the accelerators, `arithmetic` the formulas of memory, each
constant with its source; `vllm_memory` is what a vLLM engine takes. `check` refuses a run that
cannot fit. Nothing here reads weights, opens a device or imports torch.
"""
