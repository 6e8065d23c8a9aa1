"""Capacity: the smallest or cheapest fleet that serves a workload within a target of TTFT."""
