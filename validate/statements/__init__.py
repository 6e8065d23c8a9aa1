"""Statements of kvrsim, each checked against a computation of its own on random questions."""
