"""The machine: its cores and memory, the folder of caches, processes of our own."""
