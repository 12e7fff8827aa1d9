"""Tests of a run on several hosts, which are network namespaces (`testbed/hosts`)."""
