"""Files into a collection: read, cut into chunks, embed, store; again from where the last run stopped."""
