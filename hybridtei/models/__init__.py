"""Checkpoints: their files, tokenizers, families and heads."""
