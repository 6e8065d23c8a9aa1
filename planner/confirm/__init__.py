"""Confirmation of a plan: its candidates are run on the machine and compared with their predictions."""
