"""gRPC: TEI's package `tei.v1` on a port of its own, in the process and on the event loop of the HTTP server.

It translates: a message becomes the request struct of an HTTP route in `server.api`, the handler's answer becomes a message.
`import hybridtei.server.grpc` loads no gRPC; `rpc.server` does, which is imported where `--grpc-port` is given.
"""
