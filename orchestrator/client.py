"""The HTTP client of one server: streamed completions with arrival times, and the endpoints around them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from orchestrator.completion import Completion
from orchestrator.errors import InvalidMeasurement
from orchestrator.exchange import Timeouts, exchange, one_line
from orchestrator.metrics import Snapshot, parse
from orchestrator.records import Target

__all__ = ["Client", "Completion", "Timeouts"]

_STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Client:
    """An open session with `target`; use as `async with`.

    Every request has a connection of its own: a kept-alive one can be closed by the server at the moment it is
    used again, which would count as an error of the server. Opening it is not part of any latency.
    """

    def __init__(self, target: Target, timeouts: Timeouts | None = None) -> None:
        self.target = target
        self.timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            base_url=self.target.base_url,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, prompt: str | Sequence[int], max_tokens: int, **sampling: Any) -> Completion:
        """POST /v1/completions with text or token ids; never raises for what the server does."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens}
        return await self._stream("/v1/completions", {**body, **sampling})

    async def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, **sampling: Any) -> Completion:
        """POST /v1/chat/completions; never raises for what the server does."""
        body = {"messages": list(messages), "max_tokens": max_tokens}
        return await self._stream("/v1/chat/completions", {**body, **sampling})

    async def _stream(self, path: str, body: Mapping[str, Any]) -> Completion:
        whole = {"model": self.target.model, **body, **_STREAM}
        return await exchange(self.target.base_url, path, whole, self.timeouts)

    async def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list((await self._ask("/tokenize", body))["tokens"])

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return str((await self._ask("/detokenize", {"tokens": list(token_ids)}))["prompt"])

    async def prompt_logprobs(self, token_ids: Sequence[int], top_k: int) -> list[dict[int, float]]:
        """Log probabilities (nats) of the `top_k` likeliest tokens and the actual one, at positions 1..T-1.

        Entry i belongs to position i + 1: what the model expected after `token_ids[: i + 1]`.
        Raises InvalidMeasurement where the server does not answer with T - 1 full positions.
        """
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
        answer = await self._ask("/v1/completions", body)
        positions = answer["choices"][0].get("prompt_logprobs") or []
        if len(positions) != len(token_ids) or any(not entry for entry in positions[1:]):
            raise InvalidMeasurement(
                f"prompt_logprobs: {len(positions)} positions for {len(token_ids)} tokens, or an empty one"
            )
        return [{int(token): float(value["logprob"]) for token, value in entry.items()} for entry in positions[1:]]

    async def healthy(self) -> bool:
        try:
            await self._fetch("GET", "/health")
        except InvalidMeasurement:
            return False
        return True

    async def models(self) -> list[str]:
        """The ids in /v1/models."""
        return [entry["id"] for entry in json.loads(await self._fetch("GET", "/v1/models"))["data"]]

    async def metrics(self) -> Snapshot:
        return parse((await self._fetch("GET", "/metrics")).decode())

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return json.loads(await self._fetch("POST", path, json={"model": self.target.model, **body}))
        except ValueError as error:
            raise InvalidMeasurement(f"POST {path}: the answer is not JSON") from error

    async def _fetch(self, method: str, path: str, **request: Any) -> bytes:
        """The body of a 200 answer; raises InvalidMeasurement for everything else."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(self.timeouts.connect_s + self.timeouts.first_token_s),
                self._session.request(method, path, **request) as response,
            ):
                body = await response.read()
        except TimeoutError as error:
            raise InvalidMeasurement(f"{method} {path}: timed out") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InvalidMeasurement(f"{method} {path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise InvalidMeasurement(f"{method} {path}: HTTP {response.status}: {one_line(body)}")
        return body
