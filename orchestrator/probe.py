"""What a running server says of itself over HTTP: whether it is well, which names it serves, how busy it is."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from orchestrator.errors import InvalidMeasurement

HTTP_TIMEOUT_S = 5
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a box's server is never behind http_proxy
IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def body(url: str) -> bytes | None:
    """The body of a 200 answer, else None."""
    try:
        with DIRECT.open(url, timeout=HTTP_TIMEOUT_S) as answer:
            return answer.read()
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return None


def served_windows(base_url: str) -> dict[str, int]:
    """Served name -> window in tokens from /v1/models; empty for an answer that is none of vLLM's."""
    try:
        models = json.loads(body(f"{base_url}/v1/models") or b"{}")["data"]
        return {model["id"]: int(model["max_model_len"]) for model in models}
    except (ValueError, KeyError, TypeError):
        return {}


def serves(base_url: str, model: str) -> bool:
    """Whether /health is 200 and /v1/models carries `model`."""
    return body(f"{base_url}/health") is not None and model in served_windows(base_url)


def requests_in_flight(base_url: str) -> int | None:
    """Requests running and waiting, from /metrics; None where the server does not say."""
    from orchestrator import metrics

    page = body(f"{base_url}/metrics")
    if page is None:
        return None
    try:
        snapshot = metrics.parse(page.decode(errors="replace"))
    except InvalidMeasurement:
        return None
    counts = [snapshot.total(name) for name in IN_FLIGHT]
    return None if None in counts else round(sum(counts))
