"""What kvrsim answers with: the question, results, timelines and breakdowns."""
