"""What measurements and tests share: tiny checkpoints in the formats of their publishers, their
words, and how far numbers may differ."""
