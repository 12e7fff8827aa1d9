"""What answers before a run is begun, and no run imports.

`planner` lays out trainer and `engines`, by the memory of `rollstream/run/sizes/` and the `rates`
of time and volume; `proposal` prints it, `proposed_files` writes its configuration; `unlike` and
`unlike_proposal` do this for cards of several kinds. `tuning/` proposes settings of a recorded run.
`simulation_settings` reads the file of a simulation.
"""
