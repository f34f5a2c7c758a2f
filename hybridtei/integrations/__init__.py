"""Adapters for libraries that others build with."""
