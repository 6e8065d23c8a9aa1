"""Seconds of each operation: what a profile has measured, what a model calls for, and what a layer costs."""
