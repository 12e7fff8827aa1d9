"""Whole runs of the quickstart: NAMEs pipeline and cloud."""
