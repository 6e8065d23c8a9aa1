"""What decoder layers keep of the tokens before a chunk: its shape, where models hold it, and the buffers it is in."""
