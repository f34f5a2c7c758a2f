"""The transformer itself, token-wise; the only room that touches transformers' modelling code."""
