"""Measures the quality and speed of each way of searching, on collections with judgements."""
