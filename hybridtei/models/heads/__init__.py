"""Training of sparse and multi-vector heads over any frozen dense encoder: `hybridtei train --help`.

A dense model's token states already tell which words matter and which tokens match; two small heads read that. The trunk runs
once over the texts of all pairs (`run`, `models`), and in batches of neighbouring texts the heads learn to rank them as dense
similarity and full-width MaxSim together do (`fit`). No relevance labels are used. Needs torch and transformers.
"""
