"""Shapes of a transformer, layer by layer, read from its Hugging Face config.json."""
