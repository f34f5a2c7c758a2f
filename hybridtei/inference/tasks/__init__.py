"""What a caller can ask for, without I/O."""
