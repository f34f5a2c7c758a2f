"""HTTP itself: connections, bodies, keys, TLS and answers as bytes. Knows no route and no model."""
