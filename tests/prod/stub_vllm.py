"""Stands in for vLLM's API server in prod: health, names, metrics, completions that take as long as asked.

Where the file of --broken exists, it dies at once with that file's text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--broken", type=Path)
    parser.add_argument("--slow-start", type=float, default=0)
    parser.add_argument("--no-metrics", action="store_true")
    parser.add_argument("--plugin-sha256", default="")
    options, _ = parser.parse_known_args()
    if options.broken and options.broken.exists():
        print(options.broken.read_text(), flush=True)
        sys.exit(1)
    time.sleep(options.slow_start)
    attestation = {
        "nonce": os.environ["RADIANCE_BOOT_NONCE"],
        "pid": os.getpid(),
        "plugin_sha256": options.plugin_sha256,
        "knobs": {name: value for name, value in os.environ.items() if name.startswith("RADIANCE_")},
        "layers": [],
    }
    (Path(os.environ["RADIANCE_ATTEST_DIR"]) / f"attest-{os.getpid()}.json").write_text(json.dumps(attestation))
    lock, running = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                data = [{"id": name, "max_model_len": 4096} for name in options.served_model_name]
                return self.answer(json.dumps({"data": data}).encode())
            if self.path == "/metrics":
                page = "" if options.no_metrics else METRICS.format(running[0])
                return self.answer(page.encode())
            return self.answer(b"")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                running[0] += 1
            try:
                time.sleep(asked.get("seconds", 0))
            finally:
                with lock:
                    running[0] -= 1
            self.answer(b'{"choices": [{"text": "done"}]}')

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print("INFO CPU KV cache size: 46,592 tokens, Maximum concurrency 11.4x", flush=True)
    server.serve_forever()


METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0
"""

main()
