"""Measurements of a machine: the points, the repeats, and the ranks."""
