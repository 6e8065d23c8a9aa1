"""The batch executor of pipelines: waves of stages instead of a program."""
