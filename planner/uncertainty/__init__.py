"""The uncertainty of a TTFT: prediction intervals, noise, and the breakdown of TTFT."""
