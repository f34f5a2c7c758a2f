"""Output heads as pure functions: (rows, layout) -> tensor."""
