"""Fits of what some layers have besides products and plain attention; each from tables of its own."""
