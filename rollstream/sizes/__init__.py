"""What a run needs, computed before a machine is rented: memory, bytes per version, seconds per
link, volume of the log, and a configuration that fits.

`shapes` has the models, `devices` the accelerators, `arithmetic` every formula and constant with
its source, `planner` the choice of a configuration, `check` the refusal of a run that cannot fit.
Nothing here reads weights, opens a device or imports torch.
"""
