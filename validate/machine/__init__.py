"""Calibrations and plans against this machine."""
