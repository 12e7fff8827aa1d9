"""Asking the log, and auditing it: NAMEs asking and audit."""
