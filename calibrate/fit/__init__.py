"""Fit a profile to measurements: one module per kind of operation, and a report."""
