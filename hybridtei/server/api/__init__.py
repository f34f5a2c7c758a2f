"""The routes of each API dialect. Their functions use no HTTP, so `/vertex` and `/` can call them too."""
