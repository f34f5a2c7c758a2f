"""Backends: one loaded model on one device turns a packed batch into arrays."""
