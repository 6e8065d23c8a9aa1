"""The recipes of the shipped profiles, and the page about them."""
