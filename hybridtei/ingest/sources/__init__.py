"""Files in, documents out, one after the other: no reader holds more than one record, or one small file, at a time.

Whatever cannot become a document comes out too, as a `Rejected` with its place and the reason; no reader stops at it. Readers
know no model, no chunk and no store.
"""
