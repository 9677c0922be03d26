"""The command line's side of the API. The token comes from the environment or a file, never from the command line."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.records import from_jsonable
from orchestrator.schedule.job import Job

TOKEN, TOKEN_FILE = "PARO_TOKEN", "PARO_TOKEN_FILE"
TIMEOUT_S = 30.0
LONGEST_ANSWER_BYTES = 64 * 2**20
PAGE = 1_000
PLAIN = {"experiment": "experiment", "variant@a": "a", "variant@b": "b"}
OF_BODY = ("gate", "suite", "box", "kind", "schedule", "window", "zone", "priority")


def token(environment: Mapping[str, str] = os.environ) -> str:
    """Raises UsageError where there is none, or others can read its file."""
    found = environment.get(TOKEN, "")
    if not found and (name := environment.get(TOKEN_FILE, "")):
        path = Path(name)
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise UsageError(f"{TOKEN_FILE}: {path} can be read by others; `chmod 600 {path}`")
            found = path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{TOKEN_FILE}: {path} cannot be read ({error})") from None
    if not re.fullmatch(r"[\x21-\x7e]{1,512}", found):
        raise UsageError(f"server=: a token is needed; set {TOKEN}, or {TOKEN_FILE} to a file of mode 600 that has it")
    return found


@dataclass(frozen=True)
class Server:
    """`url` as in http://127.0.0.1:8642. Redirects are not followed: they could take the token elsewhere."""

    url: str
    token: str = field(repr=False)

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """The answer's JSON. Raises OrchestratorError with the server's own line, or why there is none."""
        where = urlsplit(self.url)
        if where.scheme not in ("http", "https") or not where.hostname or where.username or where.query:
            raise UsageError("server=: write an address such as http://127.0.0.1:8642")
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        headers = {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if key is not None:
            headers["Idempotency-Key"] = key
        try:
            connection = kind(where.hostname, where.port, timeout=TIMEOUT_S)
            try:
                content = None if body is None else json.dumps(body)
                connection.request(method, where.path.rstrip("/") + path, content, headers)
                answer = connection.getresponse()
                text = answer.read(LONGEST_ANSWER_BYTES)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise OrchestratorError(f"server={self.url}: it does not answer ({error})") from None
        try:
            found = json.loads(text)
        except ValueError:
            raise OrchestratorError(f"server={self.url}: status {answer.status}, and no JSON: not this API") from None
        if answer.status >= 300:
            said = found.get("error", "") if isinstance(found, dict) else ""
            raise (UsageError if answer.status < 500 else OrchestratorError)(f"server: {answer.status}: {said}")
        return found

    def _job(self, found: Any) -> Job:
        try:
            return from_jsonable(Job, found)
        except ValueError as error:
            raise OrchestratorError(f"server={self.url}: no job of this API, or of this version ({error})") from None

    def jobs(self, every: bool) -> list[Job]:
        """All that wait or run; with `every` the newest PAGE of all."""
        query = [("limit", PAGE), ("newest_first", "true")] if every else [("limit", PAGE)]
        query += [] if every else [("state", state) for state in ("queued", "running", "paused")]
        found, after = [], 0
        while True:
            page = self.ask("GET", f"/v1/jobs?{urlencode([*query, ('after', after)])}")
            found += [self._job(job) for job in (page if isinstance(page, list) else [page])]
            if every or len(page) < PAGE:
                return found
            after = found[-1].id

    def add(self, words: Sequence[str]) -> Job:
        """Queue what `schedule add` was given. An answer that is lost is asked for again under the same key."""
        body, key = submission(words)
        key = key or secrets.token_hex(16)
        try:
            return self._job(self.ask("POST", "/v1/jobs", body, key))
        except UsageError:
            raise
        except OrchestratorError:
            return self._job(self.ask("POST", "/v1/jobs", body, key))

    def cancel(self, job_id: int) -> Job:
        return self._job(self.ask("POST", f"/v1/jobs/{job_id}/cancel"))


def submission(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """(body of POST /v1/jobs, idempotency key or "") of words as `schedule add` takes them."""
    body: dict[str, Any] = {}
    overrides, key = {}, ""
    for word in words:
        name, equals, value = word.partition("=")
        name = name.lstrip("+")
        if not equals:
            raise UsageError(f"{word!r} is no override; write KEY=VALUE, for example +experiment=zpe")
        if name in PLAIN:
            body[PLAIN[name]] = value
        elif name in OF_BODY:
            body[name] = int(value) if name == "priority" and re.fullmatch(r"-?\d{1,9}", value) else value
        elif name == "after":
            body["after"] = [text for text in value.split(",") if text]
        elif name == "key":
            key = value
        else:
            overrides[name] = value
    if "box" not in body:
        raise UsageError("no box given: a server may have several; add box=NAME, for example box=cpu")
    return body | ({"overrides": overrides} if overrides else {}), key
