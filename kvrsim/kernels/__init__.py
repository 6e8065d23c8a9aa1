"""Seconds of each operation: a profile's rates, a model's calls, and the cost of a layer."""
