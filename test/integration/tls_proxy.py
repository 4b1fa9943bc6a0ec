"""A proxy as an ingress is one: it ends TLS, and serves a router below a path."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CERTIFICATE = Path(__file__).parent / "standins" / "loopback.pem"
"""Certificate of 127.0.0.1 and its key, for tests alone; a client trusts it with `SSL_CERT_FILE`."""
PREFIX = "/chitu"


@contextmanager
def tls_proxy(port: int) -> Iterator[str]:
    """Yield the URL at which the router of this port is served over TLS, below `PREFIX` alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{PREFIX}/"):
                return self.send_error(404)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            inner = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            inner.request(self.command, self.path.removeprefix(PREFIX), body, dict(self.headers))
            reply = inner.getresponse()
            answer = reply.read()
            self.send_response(reply.status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return None

        do_POST = do_GET

        def log_message(self, format: str, *words: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}{PREFIX}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
