"""The fastest strategy and number of GPUs over contexts and bandwidths."""
