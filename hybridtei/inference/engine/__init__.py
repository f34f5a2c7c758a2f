"""Requests become batches, and batches answers."""
