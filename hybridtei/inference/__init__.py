"""Turns token ids into arrays: loaded models, batches, backends and tasks."""
