"""What disturbs a prefill: its model, its text form, random draws and statistics."""
