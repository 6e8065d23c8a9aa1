"""The server of `kvrsim serve`: its pages, the searches that run in processes of their own, and the question's form."""
