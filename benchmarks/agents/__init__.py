"""Agents: programs of many turns that call tools. NAME agents."""
