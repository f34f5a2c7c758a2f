"""Qdrant's engine in a process of its own, which one folder belongs to."""
