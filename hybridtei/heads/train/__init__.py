"""Training of sparse and multi-vector heads over any frozen dense encoder: `python -m hybridtei.heads.train --help`.

A dense model's token states already know which words matter and which tokens match; two small heads read that out.
The trunk runs once over the texts (`cache`), batches are groups of neighbouring texts (`groups`, `batches`), and the
heads learn to rank them as dense similarity and full-width MaxSim together do (`fit`). No relevance labels are used.

Needs transformers besides what serving needs.
"""
