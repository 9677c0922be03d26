"""Serves a truth server of a test's own kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from truth_server import MODEL, TruthServer

from orchestrator.bench import measure_one
from orchestrator.bench.context import BenchContext
from orchestrator.records import Measurement, Target


@asynccontextmanager
async def hosted(server: TruthServer, window_tokens: int = 4096) -> AsyncIterator[Target]:
    """The target that reaches `server` on a free port of the loopback."""
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Target(f"http://127.0.0.1:{runner.addresses[0][1]}", MODEL, window_tokens)
    finally:
        await runner.cleanup()


def measured(
    name: str, server: TruthServer, params: dict[str, Any], context: BenchContext, window_tokens=4096
) -> Measurement:
    """The Measurement of one bench against `server`."""

    async def run() -> Measurement:
        async with hosted(server, window_tokens) as target:
            return await measure_one(name, target, params, context)

    return asyncio.run(run())
