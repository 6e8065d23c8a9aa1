"""From measurements of a machine to a CalibrationProfile.

The profile a100-eager is fitted by validate/published/fit.py: its rows include searched partitions, so the fit needs
the planner, which this package does not import.
"""
