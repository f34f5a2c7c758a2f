"""Documents from files into a collection."""
