"""A web site that attacks: its page calls the services, and its address can become theirs (DNS rebinding)."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = """<!doctype html><title>a page</title><script>
const outcome = {};
async function attempt(name, work) {
  const late = new Promise(done => setTimeout(done, 10000, "no answer"));
  try { outcome[name] = await Promise.race([work(), late]); } catch (error) { outcome[name] = error.name; }
}
async function call(url, options) {
  const reply = await fetch(url, {method: "POST", ...options});
  return reply.status || reply.type;
}
function opened(url) {
  return new Promise(done => {
    const socket = new WebSocket(url);
    socket.onopen = () => done("open");
    socket.onerror = () => done("refused");
  });
}
function framed(url, enctype, fields) {
  return new Promise(done => {
    const frame = document.createElement("iframe"), form = document.createElement("form");
    frame.name = "frame" + Math.random();
    Object.assign(form, {method: "POST", action: url, enctype, target: frame.name});
    for (const [name, value] of Object.entries(fields)) {
      form.append(Object.assign(document.createElement("textarea"), {name, value}));
    }
    document.body.append(frame, form);
    frame.onload = () => done("sent");
    form.submit();
  });
}
(async () => {
%s
  await fetch("/outcome", {method: "POST", body: JSON.stringify(outcome)});
})();
</script>"""


class AttackerSite:
    """The page of the site, and its address.

    Attributes:
        script: Body of the page's script.
        outcomes: The report of each opened page on its attempts.
        becomes: HOST:PORT that gets every request but that for the page, just as the browser sent it.
    """

    def __init__(self) -> None:
        self.script, self.becomes, self.port = "", "", 0
        self.outcomes: queue.Queue[dict[str, Any]] = queue.Queue()


@contextmanager
def attacker_site() -> Iterator[AttackerSite]:
    """The site, on a port of this machine."""
    site = AttackerSite()

    class AttackerSiteHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                self._answer(200, "text/html", (PAGE % site.script).encode())
            elif site.becomes:
                self._hand_on()
            else:
                self._answer(404, "text/plain", b"")

        def do_POST(self) -> None:
            if self.path == "/outcome":
                site.outcomes.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self._answer(200, "text/plain", b"")
            else:
                self._hand_on()

        def _hand_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = http.client.HTTPConnection(site.becomes, timeout=30)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            reply = connection.getresponse()
            self._answer(reply.status, reply.getheader("content-type") or "", reply.read())

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), AttackerSiteHandler)
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
