"""Token-wise transformers and the kernels of their attention; the only room that touches transformers' modelling code."""
