"""The operations that strategies are written in, and what is sent and in flight."""
