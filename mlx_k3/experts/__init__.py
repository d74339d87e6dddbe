"""Experts on demand: which expert is in memory, who reads what next, what it costs."""
