"""The services of docker-compose.yml in containers of a real Docker daemon, for tests and
measurements: `daemon` starts it, `images` makes what a registry would give, `compose` drives the
stack. Everything is removed again but the daemon's layers, which make the next start short.
"""
