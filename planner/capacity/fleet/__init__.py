"""A fleet of groups of GPUs that serve prefills: how long each prompt takes on a group, and queues of prompts."""
