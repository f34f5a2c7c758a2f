"""What a checkpoint is: its files, tokenizer, family and heads."""
