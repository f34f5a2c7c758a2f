"""Routes: wire to task to wire."""
