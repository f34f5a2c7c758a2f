"""A folder of 60 small files of 25 and more kinds, and what an ingest reads of each."""
