"""What answers before a run is begun, and no run imports.

`simulation_settings` reads the file of a simulation.
"""
