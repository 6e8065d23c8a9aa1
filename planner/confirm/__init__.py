"""A plan's candidates run on the machine, beside their predictions."""
