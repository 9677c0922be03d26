"""Who may do what through the API: bearer tokens, of which only the SHA-256 is kept, in a file of its owner's.

A token is 256 random bits, so that a plain hash cannot be turned back; it is shown once, when it is made.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable, write_bytes

FILE = "tokens.json"
PREFIX = "paro_"
SCOPES = ("read", "run", "promote")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Token:
    """`scopes`, of SCOPES: none includes another."""

    name: str
    scopes: tuple[str, ...]
    sha256: str
    made_utc: str


def path_of(state: Path) -> Path:
    return state / FILE


def load(path: Path) -> tuple[Token, ...]:
    """The tokens of the file. Raises UsageError where others could read or replace it, or it is damaged or missing."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read()
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there are no tokens; `python -m orchestrator token add NAME scopes=read` makes one"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; it must be a file that this user can read") from None
    if stat.S_IMODE(found.st_mode) != 0o600 or found.st_uid != os.geteuid():
        mode = stat.S_IMODE(found.st_mode)
        raise UsageError(f"{path}: mode {mode:03o}, owner {found.st_uid}; `chmod 600 {path}` as the user that serves")
    try:
        tokens = tuple(from_jsonable(Token, entry) for entry in json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path}: it is damaged ({said}); restore it, or move it aside and make tokens again"
        ) from None
    for token in tokens:
        if not token.scopes or not set(token.scopes) <= set(SCOPES) or not re.fullmatch(r"[0-9a-f]{64}", token.sha256):
            raise UsageError(f"{path}: token {token.name!r} has no known scope or no SHA-256; make it again")
    return tokens


def match(tokens: Sequence[Token], presented: str) -> Token | None:
    """The token that was presented. Every entry is compared, each in constant time."""
    digest, found = _digest(presented), None
    for token in tokens:
        if hmac.compare_digest(token.sha256, digest):
            found = token
    return found


def add(path: Path, name: str, scopes: Sequence[str]) -> str:
    """Make a token; returns it: it is kept nowhere. Raises UsageError for a name that is taken or no name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"token {name!r}: a name has up to 64 letters, digits, '_', '.' and '-'")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise UsageError(f"scopes={','.join(scopes)}: choose from {', '.join(SCOPES)}, with commas between them")
    with _alone(path):
        tokens = load(path) if path.exists() else ()
        if any(token.name == name for token in tokens):
            raise UsageError(f"token {name} is there already; `python -m orchestrator token remove {name}` first")
        made = PREFIX + secrets.token_urlsafe(32)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _write(path, (*tokens, Token(name, tuple(sorted(set(scopes), key=SCOPES.index)), _digest(made), now)))
        return made


def remove(path: Path, name: str) -> None:
    """The token counts no more, from the next request on. Raises UsageError where there is none."""
    with _alone(path):
        tokens = load(path)
        kept = tuple(token for token in tokens if token.name != name)
        if kept == tokens:
            raise UsageError(f"there is no token {name!r}; there are: {', '.join(t.name for t in tokens) or 'none'}")
        _write(path, kept)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two that change the file at once do so one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, tokens: Sequence[Token]) -> None:
    write_bytes(path, json.dumps([asdict(token) for token in tokens], indent=2).encode() + b"\n", mode=0o600)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class TokenFile:
    """The file as it is now: read again when it has changed, so that a removed token ends at once, and its streams."""

    def __init__(self, path: Path) -> None:
        self.path, self._seen, self._tokens = path, None, load(path)

    def match(self, presented: str) -> Token | None:
        """The token presented. Raises what `load` raises: a file that went bad lets nobody in."""
        return match(self._now(), presented)

    def has(self, token: Token) -> bool:
        """Whether the file has this very token still, with the same scopes; not where it cannot be read."""
        try:
            return token in self._now()
        except UsageError:
            return False

    def _now(self) -> tuple[Token, ...]:
        try:
            found = self.path.stat()
            seen = (found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        except OSError:
            seen = None
        if seen is None or seen != self._seen:
            self._tokens, self._seen = load(self.path), seen
        return self._tokens
