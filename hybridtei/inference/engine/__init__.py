"""The engine: turns requests into batches, and batches into answers."""
