"""What a run needs, computed before a machine is rented: memory, bytes per version, seconds per
link, volume of the log, and a configuration that fits.

`shapes` has the models, `devices` the accelerators, `arithmetic` the formulas of memory and `rates`
those of time and volume, each constant with its source; `vllm_memory` is what a vLLM engine takes.
`planner` answers a request with a layout of trainer and `engines`; `proposal` prints it,
`proposed_files` writes its configuration, and `check` refuses a run that cannot fit. `unlike` and
`unlike_proposal` do this for cards of several kinds.
Nothing here reads weights, opens a device or imports torch.
"""
