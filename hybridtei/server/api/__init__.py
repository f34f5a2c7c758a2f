"""The routes of each API dialect, a file a dialect. Most functions know no HTTP, so `/`, `/vertex`
and gRPC call them too."""
