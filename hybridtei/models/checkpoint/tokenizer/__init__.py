"""A checkpoint's tokenizer, from tokenizer.json or older files, under the settings beside it."""
