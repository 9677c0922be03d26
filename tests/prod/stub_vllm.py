"""Stands in for vLLM's API server in prod: health, names, metrics, completions that take as long as asked, or are
streamed, one byte a token.

Where the file of --broken exists, it dies at once with that file's text. Of SIGTERM it dies at once, or with
--shutdown-timeout as soon as its requests have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
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
    parser.add_argument("--shutdown-timeout", type=int, default=0)
    parser.add_argument("--engine", action="store_true")  # a process beside it, as vLLM's EngineCore
    parser.add_argument("--plugin-sha256", default="")
    parser.add_argument("--bits", type=int, default=0)  # of the one layer that the plugin attests; 0: none
    parser.add_argument("--prefill-ms", type=float, default=2)
    parser.add_argument("--token-ms", type=float, default=1)
    parser.add_argument("--says", choices=["words", "nothing", "loops"], default="words")
    options, _ = parser.parse_known_args()
    if options.broken and options.broken.exists():
        print(options.broken.read_text(), flush=True)
        sys.exit(1)
    if options.engine:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "VLLM::EngineCore"])
    time.sleep(options.slow_start)
    attestation = {
        "nonce": os.environ["RADIANCE_BOOT_NONCE"],
        "pid": os.getpid(),
        "plugin_sha256": options.plugin_sha256,
        "knobs": {name: value for name, value in os.environ.items() if name.startswith("RADIANCE_")},
        "layers": [{"name": "q", "bits": options.bits}] if options.bits else [],
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
            if self.path == "/tokenize":
                return self.answer(json.dumps({"tokens": list(asked["prompt"].encode())}).encode())
            with lock:
                running[0] += 1
            try:
                if asked.get("stream"):
                    return self.stream(asked)
                time.sleep(asked.get("seconds", 0))
            finally:
                with lock:
                    running[0] -= 1
            return self.answer(json.dumps({"choices": [{"text": options.served_model_name[-1]}]}).encode())

        def stream(self, asked: dict) -> None:
            if asked["model"] not in options.served_model_name:
                self.send_error(404)
                return
            chat = "messages" in asked
            prompt = asked["messages"][-1]["content"].encode() if chat else asked["prompt"]
            text = {"words": random.Random(str(prompt)).choices(LETTERS, k=asked["max_tokens"]), "nothing": " " * 4096}
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            time.sleep(options.prefill_ms / 1e3)
            for number in range(asked["max_tokens"]):
                if number:
                    time.sleep(options.token_ms / 1e3)
                letter = text.get(options.says, "x" * 4096)[number]
                last = number + 1 == asked["max_tokens"]
                choice = {"delta": {"content": letter}} if chat else {"text": letter}
                usage = {"prompt_tokens": len(prompt), "completion_tokens": number + 1}
                choices = [{**choice, "finish_reason": "length" if last else None}]
                self.wfile.write(f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    print("INFO [paroquant_gfx1201] linear layers: 1/1 on our kernel", flush=True)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print("INFO CPU KV cache size: 46,592 tokens, Maximum concurrency 11.4x", flush=True)

    def end() -> None:
        server.shutdown()  # no request is taken any more
        deadline = time.monotonic() + options.shutdown_timeout
        while running[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # the last answer is on its way
        os._exit(0)

    if options.shutdown_timeout:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end).start())
    server.serve_forever(poll_interval=0.05)
    time.sleep(options.shutdown_timeout + 1)


LETTERS = "abcdefghijklmnopqrstuvwxyz "
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0
"""

main()
