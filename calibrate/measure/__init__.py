"""What is timed, how often, and on which ranks."""
