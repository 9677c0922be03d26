"""vLLM's stand-in for whole runs: the truth server's answers, with a boot's log line, attestation and served name."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from aiohttp import web

from tests.bench import truth_server


class MeasuredServer(truth_server.TruthServer):
    """`fault` "dies-when-used" ends it at its first request."""

    def __init__(self, script: truth_server.Script, fault: str) -> None:
        super().__init__(script)
        self.fault = fault

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": truth_server.MODEL, "max_model_len": 4096}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if self.fault == "dies-when-used":
            os._exit(9)
        if self.fault == "fails-requests" and self.sent:  # the first request of a boot warms it
            return web.json_response({"error": {"message": "engine is dead"}}, status=500)
        return await super()._completions(request)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fault", default="")
    parser.add_argument("--plugin-sha256", default="")
    options, _ = parser.parse_known_args()
    fault, nonce = options.fault, os.environ["RADIANCE_BOOT_NONCE"]
    if fault == "dies":
        sys.exit("RuntimeError: nothing works")
    if fault == "drops-a-knob" and "REEXECUTED" not in os.environ:
        env = {**os.environ, "REEXECUTED": "1"}
        del env["RADIANCE_PQ_ZPE"]
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    if fault == "compiles":  # at every boot
        path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / f"{nonce}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"compiled")
    attestation = {
        "nonce": nonce,
        "pid": os.getpid(),
        "plugin_sha256": options.plugin_sha256,
        "knobs": {name: value for name, value in os.environ.items() if name.startswith("RADIANCE_")},
        "layers": [{"name": "model.layers.0.mlp.down_proj", "bits": 5}],
    }
    (Path(os.environ["RADIANCE_ATTEST_DIR"]) / f"attest-{os.getpid()}.json").write_text(json.dumps(attestation))
    print("INFO [paroquant_gfx1201] linear layers: 120/120 on our kernel, 0 not quantized", flush=True)
    print("INFO CPU KV cache size: 46,592 tokens", flush=True)
    (truth_server.MODEL,) = [name for name in options.served_model_name if nonce in name]
    app = MeasuredServer(truth_server.Script(), fault).app()
    web.run_app(app, host=options.host, port=options.port, print=None)


main()
