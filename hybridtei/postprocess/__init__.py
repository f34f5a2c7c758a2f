"""Arrays after the shared pass: cutting, normalising, merging; numpy only."""
