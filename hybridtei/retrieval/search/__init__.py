"""Hybrid search of a collection: queries, fusion, reranking, explanation."""
