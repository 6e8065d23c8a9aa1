"""The paper's figures, drawn from the simulator beside what is published: `python -m validate.figures`."""
