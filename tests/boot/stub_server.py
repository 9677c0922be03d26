"""Stands in for vLLM's API server: the same endpoints, log line and attestation, and one fault on demand."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fault", default="")
    parser.add_argument("--plugin-sha256", default="")
    options, _ = parser.parse_known_args()
    fault = options.fault
    if fault == "dies":
        print("RuntimeError: operator torchvision::nms does not exist", flush=True)
        sys.exit(1)
    if fault == "says-its-token":
        sys.exit(f"RuntimeError: 401 for token {os.environ['HF_TOKEN']}")
    if fault == "talks-and-dies":
        for number in range(5000):
            os.write(2 if number % 7 else 1, f"line {number}\n".encode())
        sys.exit(3)
    if fault == "eats-memory":
        eaten = [bytearray(os.urandom(1 << 20)) for _ in range(4096)]
        print(len(eaten), flush=True)
    if fault == "fills-the-cache":
        (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "graph.so").parent.mkdir(parents=True)
        (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "graph.so").write_bytes(bytes(64 << 20))
    if fault == "engine-fails":
        print("ERROR EngineCore failed to start.", flush=True)
        time.sleep(600)
    if fault == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "leaves-a-child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if fault == "has-a-worker":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "VLLM::Worker_TP0"])
    if fault == "drops-a-knob" and "REEXECUTED" not in os.environ:
        env = {**os.environ, "REEXECUTED": "1"}
        del env["RADIANCE_PQ_ZPE"]
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    if fault == "compiles":
        path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "ab" / "graph.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"compiled")
    if fault == "adds-a-knob":
        os.environ["RADIANCE_PQ_NEW"] = "1"
    if fault == "attests-half":
        (Path(os.environ["RADIANCE_ATTEST_DIR"]) / "attest-1.json").write_text('{"nonce": "')
    if fault != "attests-nothing":
        knobs = {k: v for k, v in os.environ.items() if k.startswith("RADIANCE_")}
        layers = [] if fault == "no-layers" else [{"name": "model.layers.0.mlp.down_proj", "bits": 5}]
        attestation = {
            "nonce": os.environ["RADIANCE_BOOT_NONCE"],
            "pid": os.getpid(),
            "plugin_sha256": "f" * 64 if fault == "other-plugin" else options.plugin_sha256,
            "knobs": knobs,
            "layers": layers,
        }
        (Path(os.environ["RADIANCE_ATTEST_DIR"]) / f"attest-{os.getpid()}.json").write_text(json.dumps(attestation))
    print("INFO [paroquant_gfx1201] linear layers: 120/120 on our kernel, 0 not quantized", flush=True)
    names = ["somebody-elses"] if fault == "other-model" else options.served_model_name

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = {"data": [{"id": name, "max_model_len": 4096} for name in names]}
            body = json.dumps(models).encode() if self.path == "/v1/models" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    if fault == "hangs":
        time.sleep(600)
    if fault == "binds-late":
        print("INFO CPU KV cache size: 46,592 tokens", flush=True)
        time.sleep(600)
    if fault == "speaks-no-http":
        print("INFO CPU KV cache size: 46,592 tokens", flush=True)
        with socket.create_server((options.host, options.port)) as listener:
            while True:
                stranger, _ = listener.accept()
                with stranger:
                    stranger.sendall(b"220 mail.example ESMTP\r\n")
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print("INFO CPU KV cache size: 46,592 tokens, Maximum concurrency 11.4x", flush=True)
    server.serve_forever()


main()
