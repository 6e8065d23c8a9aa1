"""What helps people to find the right words: help in groups, shell completion, suggestions for mistakes."""
