"""The recipes of the shipped profiles."""
