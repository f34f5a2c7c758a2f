"""Wire to task to wire: what each inference route computes, free of HTTP, so that `/vertex` and `/` can ask for it too."""
