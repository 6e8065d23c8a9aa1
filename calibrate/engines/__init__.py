"""Fits of the engines' records to measured settings: `python -m calibrate.engines`."""
