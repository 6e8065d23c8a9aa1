"""Whole prefills beside the sums of their kernels."""
