"""Strings in, token ids out."""
