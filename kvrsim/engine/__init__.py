"""Engine: what the software that serves a model adds to the kernels' own time."""
