"""Interactive pages: one HTML file each, which holds its data, its scripts and its styles, and asks nobody for more."""
