"""Pipelines: how many pieces, how long each, which layers on which stage, and how fast any of them could be."""
