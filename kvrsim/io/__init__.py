"""What is written to disk and read back: whole files and journals."""
