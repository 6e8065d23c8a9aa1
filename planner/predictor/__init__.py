"""A predictor of TTFT that runs without kvrsim: a grid of simulated prefills, and interpolation between them."""
