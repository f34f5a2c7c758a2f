"""Training of sparse and multi-vector heads over any frozen dense encoder: `hybridtei train
--help`.

A dense model's token states already encode which words matter and which tokens match; two small
heads learn to extract this. The trunk runs once over the texts of all pairs (`run`, `models`). In
batches of neighbouring texts the heads learn to rank like dense similarity and full-width MaxSim
together (`fit`). Training uses no relevance labels. It needs torch and transformers.
"""
