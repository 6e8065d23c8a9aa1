"""The planner: it searches the best partitions by simulation and bounds how far they can be from the optimum."""
