"""Vectors in Qdrant: a server or cluster, or the engine embedded in a process of its own. Needs the extra `qdrant`."""

MAX_LIMIT = 100_000  # points that one query may ask for
