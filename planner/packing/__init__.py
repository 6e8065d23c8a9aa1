"""Several prompts at once: which of them an engine packs into a step, and what such a step costs."""
