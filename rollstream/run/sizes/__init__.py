"""Whether a run fits into the memory of its machines, without torch, a device or weights. `shapes`
has the models, `devices` the accelerators, `arithmetic` the formulas, each constant with its
source; `vllm_memory` is what a vLLM engine takes. `check` refuses a run that cannot fit.
"""
