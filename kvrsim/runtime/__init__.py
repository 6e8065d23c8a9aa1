"""Prefills of Hugging Face models over torch.distributed, with the simulator's partitions."""
