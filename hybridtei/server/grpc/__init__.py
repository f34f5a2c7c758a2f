"""gRPC: TEI's package `tei.v1` on its own port, on the event loop of the HTTP server.

It translates a message to the request struct of an HTTP route in `server.api`, and the handler's
answer to a message. `import hybridtei.server.grpc` does not import grpcio. `grpc.server` does; it
is imported only with `--grpc-port`.
"""
