"""Models that people run: which of NVIDIA's collection of configurations kvrsim plans."""
