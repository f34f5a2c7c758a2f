"""Files in, facts and tensors out."""
