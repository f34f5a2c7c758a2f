"""How good and how fast each way of searching is, on collections with judgements."""
