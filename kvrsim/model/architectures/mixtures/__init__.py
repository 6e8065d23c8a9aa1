"""Mixtures of experts with softmax attention."""
