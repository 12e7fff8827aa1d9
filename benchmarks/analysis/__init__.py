"""Queries over the log, and its audit: NAMEs asking and audit."""
