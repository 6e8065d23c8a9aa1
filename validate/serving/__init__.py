"""Prefills measured on serving engines: fits of the engines' terms, and comparisons with predictions."""
