"""Measurement rows, their CSV files, and where they come from."""
