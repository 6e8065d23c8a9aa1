"""Searches for the best partition: analytical plan, pattern search and grid search; and lower bounds."""
