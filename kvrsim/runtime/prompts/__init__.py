"""Prompts one behind the other on ranks, without a barrier between them."""
