"""Encoder outputs into Qdrant, and ranked answers out: a server or cluster by gRPC, or the embedded engine.

Knows outputs and what a checkpoint says about itself; knows no HTTP server of ours. Wants the extra `qdrant`.
"""
