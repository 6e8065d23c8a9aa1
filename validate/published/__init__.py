"""Published TTFTs, compared with the predictions."""
