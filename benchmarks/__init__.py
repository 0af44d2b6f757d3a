"""Measurements behind the claims of the README; RESULTS.md holds what they printed."""
