"""A folder of 97 small files of 40 and more kinds, and what an ingest reads of each."""
