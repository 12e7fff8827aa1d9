"""Agents: programs of many turns that call tools, environments that let them wait. NAME agents."""
