"""The HTTP server and the gRPC server."""
