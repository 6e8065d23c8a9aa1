"""The answers of kvrsim: the question, results, timelines and breakdowns."""
