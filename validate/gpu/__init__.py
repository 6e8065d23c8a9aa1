"""The first hour on a GPU node, as one command with a report: `python -m validate.gpu`."""
