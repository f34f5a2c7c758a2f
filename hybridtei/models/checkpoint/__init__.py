"""Reads a checkpoint's files: facts and tensors."""
