"""gRPC: TEI's package `tei.v1` on a port of its own, in the process and on the event loop of the HTTP server.

It translates: messages become the requests of `server.wire`, the answers of `server.answers` become messages. What an answer
is, it does not know. `import hybridtei.rpc` loads no gRPC; `rpc.server` does, which is imported where `--grpc-port` is given.
"""
