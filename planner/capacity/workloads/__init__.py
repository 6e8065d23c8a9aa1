"""Requests over time: read from traces in the formats people have, or drawn at random."""
