"""A model split over ranks: by its matrices (tensor parallelism) or by its layers (a pipeline's stages)."""
