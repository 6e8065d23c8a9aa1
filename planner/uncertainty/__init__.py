"""How sure a TTFT is: prediction intervals, noise, robust plans, breakdown."""
