"""The machine: cores, memory, cache folder, child processes; logs, metrics and traces."""
