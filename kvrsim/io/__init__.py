"""Reading and writing of files: whole files and journals."""
