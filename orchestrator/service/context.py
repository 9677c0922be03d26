"""What the routes work on, and how they answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.responses import Response

from orchestrator.schedule.queue import Queue
from orchestrator.service.feed import MAX_WATCHERS, SEND_TIMEOUT_S, Feed
from orchestrator.service.limits import BODY_TIMEOUT_S, Rate
from orchestrator.service.moves import Moves
from orchestrator.service.tokens import TokenFile
from orchestrator.service.worker import Worker


@dataclass
class Service:
    """`places` are the server's own `paths.*` words; `wake` has the loop look at once; `hosts` are the names that a
    request may call the server by, empty for any. `boxes` are those that this machine is, None where others may join.
    `feed` is there while the application runs."""

    state: Path
    tracking: Path
    places: Sequence[str]
    queue: Queue
    moves: Moves
    tokens: TokenFile
    say: Callable[[str], None]
    wake: Callable[[], None] = lambda: None
    stopping: Callable[[], bool] = lambda: False
    hosts: frozenset[str] = frozenset()
    boxes: Collection[str] | None = None
    rate: Rate = field(default_factory=lambda: Rate(per_s=50, burst=200))
    refused: Rate = field(default_factory=lambda: Rate(per_s=5, burst=50))
    body_timeout_s: float = BODY_TIMEOUT_S
    most_watchers: int = MAX_WATCHERS
    send_timeout_s: float = SEND_TIMEOUT_S
    worker: Worker = field(default_factory=Worker)
    feed: Feed | None = None

    def encode(self, data: Any) -> bytes:
        """JSON without the server's directories, which are no client's business."""
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        for path, name in ((self.tracking, "TRACKING"), (self.state, "STATE")):
            if len(path.parts) > 1:
                text = text.replace(json.dumps(str(path))[1:-1], name)
        return text.encode()

    def answer(self, data: Any, status: int = 200, **headers: str) -> Response:
        return Response(self.encode(data), status, headers, "application/json")


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _who(request: Request) -> str:
    return request.scope["state"]["who"]


Serving = Annotated[Service, Depends(_service)]
Who = Annotated[str, Depends(_who)]  # the token's name
