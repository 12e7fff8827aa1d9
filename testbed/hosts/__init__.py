"""Two sites and the link between them in network namespaces of this machine, for tests and
measurements: `namespaces` makes the hosts, `link` carries packets between the sites with a delay,
a rate and losses, and can be cut, `sites` puts both together with broker and bucket, and `run`
drives the roles of a run on these hosts. It needs root. All of it ends with its processes.
"""
