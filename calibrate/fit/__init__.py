"""From measurements to a profile: one module per kind of operation, and a report."""
