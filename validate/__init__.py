"""The evidence: published numbers with their citations, and how far the predictions are from them."""
