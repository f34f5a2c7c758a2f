"""Token ids in, arrays out: loaded models, batches, backends and tasks."""
