"""The paper's figures, simulated and compared with the published numbers: `python -m validate.figures`."""
