"""Published TTFTs, and the predictions beside them."""
