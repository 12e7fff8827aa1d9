"""docker-compose.yml on a Docker daemon: NAME stack."""
