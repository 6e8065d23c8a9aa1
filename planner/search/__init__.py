"""The best partition: analytical plan, pattern search, grid search and lower bound."""
