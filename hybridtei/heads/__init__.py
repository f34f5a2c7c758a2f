"""Heads and their training: `hybridtei train`; formulas of heads are the backends'."""
