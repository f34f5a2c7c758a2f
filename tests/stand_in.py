"""A small HTTP server whose answers a test makes: a proxy that goes wrong, or another program's."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Status, headers, body
Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def answering(answer):
    """Its URL. `answer`: of a request's method, path and body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet
        wbufsize = -1

        def do_GET(self):
            asked = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, body = answer(self.command, self.path, asked)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
