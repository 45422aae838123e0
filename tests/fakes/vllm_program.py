"""`python vllm_program.py serve MODEL --port N`: a program that starts as vLLM does, and dies when it is asked to."""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        print("EngineDeadError: asked to die", flush=True)
        os._exit(3)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


if __name__ == "__main__":
    if sys.argv[2] == "missing":
        print("starting\nOSError: missing is no model\n", flush=True)
        sys.exit(1)
    print(" ".join(sys.argv), os.environ.get("VLLM_SERVER_DEV_MODE"), flush=True)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
