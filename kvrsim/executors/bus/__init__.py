"""The batch executor where flows share one bandwidth."""
