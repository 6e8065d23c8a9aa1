"""The planner: searches partitions against the simulator and proves how far they can be from the best."""
