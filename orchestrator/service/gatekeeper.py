"""What every request passes before any of its body is parsed: host, token, rate, scope, size, type; and the access log.

The log has method, route, status, milliseconds and the token's name. It never has a header, a query or the path as it
was sent: a client may have put its token there. A defect is in it with its traceback, which no answer has.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.errors import UsageError
from orchestrator.service.limits import LONGEST_BODY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.service.context import Service
    from orchestrator.service.tokens import Token

PUBLIC = "public"
SCOPE = "x-scope"  # in a route's OpenAPI: the scope that it takes, or PUBLIC; a route that has none is closed


class Gatekeeper:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], service: Service) -> None:
        self.app, self.routes, self.service = app, routes, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        began_s, status, who = time.monotonic(), 0, "-"
        route, needed = self._route(scope)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refusal, who, token = self._refusal(scope, needed)
            if refusal is None:
                scope.setdefault("state", {}).update(who=who, token=token)
                body = await _body(scope, receive, self.service.body_timeout_s)
                if isinstance(body, bytes):
                    await self.app(scope, _replayed(body, receive), noted)
                    return
                refusal = body
            await _answer(noted, *refusal)
        except Exception:
            for line in traceback.format_exc().splitlines():
                self.service.say(f"defect: {line}")
            if status:
                raise  # the answer has begun: the connection is closed
            await _answer(noted, 500, "a defect of the server; its log says more", {})
        finally:
            took_ms = 1000 * (time.monotonic() - began_s)
            self.service.say(f"{scope['method'][:10]} {route} {status or 'cut off'} {took_ms:.0f} ms {who}")

    def _route(self, scope: Scope) -> tuple[str, str | None]:
        """The route's path as declared, and its scope; None where no route takes the request."""
        for route in self.routes:
            if route.matches(scope)[0] is Match.FULL:
                return route.path, scope_of(route)
        return "(no route)", None

    def _refusal(self, scope: Scope, needed: str | None) -> tuple[tuple | None, str, Token | None]:
        """(status, error, headers) where the request ends here, the token's name, and the token."""
        service = self.service
        if service.hosts and _host(scope) not in service.hosts:  # a page whose name was bound to this address anew
            return (421, "the server does not go by this Host; http.names=NAME adds one", {}), "-", None
        if needed == PUBLIC:
            wait_s = service.rate.wait_s("")
            return (_slow(wait_s) if wait_s else None), "-", None
        given = _headers(scope, b"authorization")
        kind, _, presented = given[0].decode("latin-1").partition(" ") if len(given) == 1 else ("", "", "")
        try:
            token = service.tokens.match(presented.strip()) if kind.lower() == "bearer" else None
        except UsageError as error:
            service.say(f"nobody is let in: {error}")
            return (503, "the tokens cannot be read; the server's log says why", {}), "-", None
        if token is None:
            if wait_s := service.refused.wait_s(""):
                return _slow(wait_s), "-", None
            said = "no valid token; send `Authorization: Bearer TOKEN`"
            return (401, said, {"www-authenticate": "Bearer"}), "-", None
        if wait_s := service.rate.wait_s(token.name):
            return _slow(wait_s), token.name, token
        if needed is not None and needed not in token.scopes:
            return (403, f"this needs a token with the scope {needed}", {}), token.name, token
        return None, token.name, token


def scope_of(route: BaseRoute) -> str:
    """The scope that the route declares."""
    return (getattr(route, "openapi_extra", None) or {}).get(SCOPE, "closed")


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for header, value in scope["headers"] if header == name]


def _host(scope: Scope) -> str:
    """The Host header without its port; empty where there is none, or more than one."""
    given = _headers(scope, b"host")
    text = given[0].decode("latin-1").lower() if len(given) == 1 else ""
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]


def _slow(wait_s: float) -> tuple:
    return 429, "too many requests", {"retry-after": str(max(1, round(wait_s + 0.5)))}


async def _body(scope: Scope, receive: Receive, timeout_s: float) -> bytes | tuple:
    """All of the body, or the refusal of one that is too long, too slow or no JSON."""
    too_long = (413, f"the body has more than {LONGEST_BODY_BYTES} bytes", {"connection": "close"})
    declared = next(iter(_headers(scope, b"content-length")), b"0")
    if not declared.isdigit() or int(declared[:20]) > LONGEST_BODY_BYTES:
        return too_long
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > LONGEST_BODY_BYTES:
                    return too_long
                more = message["type"] != "http.disconnect" and message.get("more_body", False)
    except TimeoutError:
        return 408, f"the body took longer than {timeout_s:g} s", {"connection": "close"}
    kind = b",".join(_headers(scope, b"content-type")).partition(b";")[0].strip().lower()
    if body and kind != b"application/json":  # what a page of another site can send without asking is none
        return 415, "send JSON, with Content-Type: application/json", {}
    return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _answer(send: Send, status: int, error: str, headers: dict[str, str]) -> None:
    content = json.dumps({"error": error}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
