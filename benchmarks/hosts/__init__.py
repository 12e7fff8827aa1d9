"""Two sites and the link between them, in network namespaces: NAME hosts."""
