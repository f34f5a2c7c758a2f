"""HTTP and nothing but."""
