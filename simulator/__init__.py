"""A cluster in virtual time, which runs the service's own planners
(`docs/explanation/simulator.md`).

`experiment` turns settings into runs and estimates real ones. `simulation` is the loop over the
events of a `world`: rollouts (`cluster`, with the engine in `replica`, `cache`, `drafting`,
`step_times`, `usage`), `dispatch`, `repack`. `policies` are the compared schedules, `settings` and
`workload` the work, `constants` the assumed numbers, `results` the measurements, `saved_runs` their
file.
"""

if __name__ == "simulator":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.simulator", name="simulator")
