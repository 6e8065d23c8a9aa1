"""Models with latent attention, and with attention to chosen keys."""
