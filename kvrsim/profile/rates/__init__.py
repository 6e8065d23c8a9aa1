"""What a device was measured to reach, one kind of operation a file: rates, and seconds from them."""
