"""Which strategy on how many GPUs is the fastest, over contexts and bandwidths."""
