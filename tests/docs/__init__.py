"""Tests of the documentation: links, walks and printed commands follow the code."""
