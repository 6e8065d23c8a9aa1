"""A predictor of TTFT that runs without the simulator: a grid of simulated prefills, and interpolation."""
