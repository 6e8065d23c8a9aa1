"""Drawing: one place that saves a figure."""
