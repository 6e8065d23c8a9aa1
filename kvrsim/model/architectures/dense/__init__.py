"""Dense models with softmax attention."""
