"""Several processes in one server: one holds the engine, the others read and write HTTP."""
