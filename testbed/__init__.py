"""What tests and benchmarks both start: real servers, processes of the product, and workloads.

`servers` starts Kafka and S3, `run_process` a run, `relay_network` a chain of relays. `kills` kills
real processes at chosen writes, `stepped` runs every role in one process under one clock, `hostile`
appends malformed records, `violations` plants violations that audit must find. `waiting` is the one
poll loop. `memory` has a bus and a store of one process. `stack` runs docker-compose.yml on a
Docker daemon.

The product never imports this package.
"""
