"""GPUs, links and clusters, from datasheets or a user's file."""
