"""Prefills of large mixtures of experts beside the estimates of NVIDIA's package aiconfigurator-core."""
