"""From measurements to a profile: one file a kind of operation, and a report."""
