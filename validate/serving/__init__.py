"""Prefills measured on serving engines: the engines' terms fitted to them, and predictions beside them."""
