"""One loaded model on one device: a packed batch in, arrays out."""
