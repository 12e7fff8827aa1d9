"""One-off research: what was asked once of the project, with the programs that answered it.

`evidence/` compares training objectives and lags by paired runs, which `evidence_runs` makes
(`python -m benchmarks evidence` says what they show); `gpu_check/` tries the project on a GPU;
`sweep` and `grids` simulate published figures under `draws` of what the papers leave open. A
promise that holds from release to release is a case of `benchmarks/`.
"""
