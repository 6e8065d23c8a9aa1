"""Published and measured numbers with their sources, and the errors of the predictions."""
