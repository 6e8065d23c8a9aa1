"""Whole prefills that a user has timed on an engine: reading them, fitting an engine to them, checking a profile."""
