"""A predictor of TTFT to take along: a grid of simulated prefills, and what lies between its points."""
