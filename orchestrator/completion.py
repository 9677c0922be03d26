"""One streamed completion: what arrived, when, and what may be computed from it.

Times are `time.perf_counter_ns` readings of this process. An *update* is one event of the stream that carried
tokens; under speculative decoding it carries several. Updates that arrived in one socket read share their time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

COUNTS = ("completion_tokens", "prompt_tokens")  # of a usage
WHOLE = ("stop", "length", "tool_calls")  # finish reasons of an output that is whole, or as long as was asked


@dataclass(frozen=True)
class Completion:
    """A finished or failed request. Where `error` is not empty nothing else of it may be averaged in."""

    sent_ns: int  # the request's head was written to its connection; waiting for a slot comes before
    end_ns: int
    update_ns: tuple[int, ...]
    update_tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int | None  # prompt tokens from the prefix cache; None where the server does not say
    completion_tokens: int
    finish_reason: str
    text: str
    reasoning: str
    error: str
    queue_ns: int = 0  # asked for until written: the client's own queue and the connection, in no latency
    reasoning_tokens: int = 0  # of `completion_tokens`, those that came in the reasoning channel

    @property
    def ttft_ms(self) -> float:
        """Request written until the first update arrived."""
        return (self.update_ns[0] - self.sent_ns) / 1e6

    @property
    def decode_span_ms(self) -> float:
        """First update until last update."""
        return (self.update_ns[-1] - self.update_ns[0]) / 1e6

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first update: the ones whose time is `decode_span_ms`."""
        return sum(self.update_tokens[1:])

    @property
    def decode_tok_per_s(self) -> float | None:
        """None where everything arrived in one update or at one time."""
        return 1e3 * self.decode_tokens / self.decode_span_ms if self.decode_span_ms > 0 else None

    @property
    def gaps(self) -> tuple[tuple[float, int], ...]:
        """(milliseconds since the update before, tokens that came with it); updates of one read are one."""
        merged: list[list[int]] = []
        for at_ns, tokens in zip(self.update_ns, self.update_tokens, strict=True):
            if merged and merged[-1][0] == at_ns:
                merged[-1][1] += tokens
            else:
                merged.append([at_ns, tokens])
        return tuple(((later[0] - earlier[0]) / 1e6, later[1]) for earlier, later in pairwise(merged))

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """One value a token after the first update: its gap shared among the tokens that ended it.

        Zero for the tokens of later updates that came in one read with the first.
        """
        shared = [gap_ms / tokens for gap_ms, tokens in self.gaps for _ in range(tokens)]
        return (*(0.0,) * (self.decode_tokens - len(shared)), *shared)

    @property
    def longest_gap_ms(self) -> float:
        return max((gap_ms for gap_ms, _ in self.gaps), default=0.0)

    def sample(self, **labels: Any) -> dict[str, Any]:
        """The raw record that is stored: times in milliseconds since the request was written."""
        return {
            **labels,
            "sent_ns": self.sent_ns,
            "end_ms": round((self.end_ns - self.sent_ns) / 1e6, 4),
            "update_ms": [round((at_ns - self.sent_ns) / 1e6, 4) for at_ns in self.update_ns],
            "update_tokens": list(self.update_tokens),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "queue_ms": round(self.queue_ns / 1e6, 4),
            "completion_tokens": self.completion_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "finish_reason": self.finish_reason,
            "longest_gap_ms": round(self.longest_gap_ms, 4),
            "error": self.error,
        }


class CompletionReader:
    """Reads the server-sent events of one completion or chat stream."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens  # that were asked for; None: as many as the server likes
        self.done = False
        self.error = ""
        self.last_ns = 0  # the newest read, [DONE]'s where it came
        self.token_ns = 0  # the newest token
        self._rest: list[bytes] = []  # of a line that is not whole
        self._update_ns: list[int] = []
        self._update_tokens: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._finish_reason = ""
        self._usage: Mapping[str, Any] | None = None  # the newest of any event
        self._usage_per_update = True
        self._tokens = 0
        self._reasoning_tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def feed(self, data: bytes, at_ns: int) -> bool:
        """Take what one socket read at `at_ns` gave; True where it brought at least one token."""
        if not self.done:
            self.last_ns = at_ns
        before = self._tokens
        if b"\n" not in data:  # an event of megabytes comes in thousands of reads
            self._rest.append(data)
            return False
        *lines, rest = b"".join((*self._rest, data)).split(b"\n")
        self._rest = [rest]
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at_ns)
        return self._tokens > before

    def _event(self, payload: bytes, at_ns: int) -> None:
        if self.done:
            return
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            self._fail(f"an event that is not JSON: {payload[:80]!r}")
            return
        if not isinstance(event, dict):
            self._fail(f"an event that is not an object: {payload[:80]!r}")
            return
        if event.get("error"):
            error = event["error"]
            self._fail(f"error event: {error.get('message', error) if isinstance(error, dict) else error}")
            return
        usage = event.get("usage")
        try:
            if usage is not None and not all(_is_count(usage.get(key, 0)) for key in COUNTS):
                raise ValueError
            if usage is not None and self._max_tokens is not None and usage["completion_tokens"] > self._max_tokens:
                self._fail(f"usage says {usage['completion_tokens']} tokens, {self._max_tokens} were asked for at most")
                return
            self._usage = usage or self._usage
            for choice in event.get("choices") or ():
                self._choice(choice, usage, at_ns)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._fail(f"an event of another shape: {payload[:160]!r}")

    def _choice(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None, at_ns: int) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        carries = bool(text or reasoning or delta.get("tool_calls"))
        if not (isinstance(text, str) and isinstance(reasoning, str)):
            raise TypeError
        self._text.append(text)
        self._reasoning.append(reasoning)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if not carries and not self._tokens and "role" in delta:
            return  # the announcement of the role is not the first token, whatever its usage says
        if usage is not None:
            new = usage["completion_tokens"] - self._tokens
        else:
            self._usage_per_update = False
            new = 1 if carries else 0
        if new < 0:
            self._fail(f"usage fell from {self._tokens} to {usage['completion_tokens'] if usage else 0} tokens")
        elif new:
            self._tokens += new
            self._reasoning_tokens += new if reasoning and not text else 0
            self.token_ns = at_ns
            self._update_ns.append(at_ns)
            self._update_tokens.append(new)

    def _fail(self, reason: str) -> None:
        self.error = self.error or reason

    def finish(self, sent_ns: int, end_ns: int, error: str = "", called_ns: int | None = None) -> Completion:
        """The record. `error` is what ended the request from outside (timeout, status, broken connection).

        `called_ns` is when the request was asked for, None where that is when it was written.
        """
        usage = self._usage or {}
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        total = usage.get("completion_tokens", 0)
        if error:
            self._fail(error)
        elif not self.done:
            self._fail(f"the stream ended without [DONE] after {self._tokens} tokens")
        elif not self._finish_reason:
            self._fail(f"the stream ended without a finish_reason after {self._tokens} tokens")
        elif self._finish_reason not in WHOLE:
            self._fail(f"finish_reason {self._finish_reason} after {self._tokens} tokens")
        elif self._usage is None:
            self._fail(f"the stream ended without usage after {self._tokens} tokens")
        elif total != self._tokens:
            how = "" if self._usage_per_update else " (the server sends no usage with each update)"
            self._fail(f"usage says {total} tokens, the updates carried {self._tokens}{how}")
        elif not self._tokens:
            self._fail("no token arrived")
        return Completion(
            sent_ns=sent_ns,
            end_ns=end_ns,
            update_ns=tuple(self._update_ns),
            update_tokens=tuple(self._update_tokens),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=cached if _is_count(cached) else None,
            completion_tokens=self._tokens,
            finish_reason=self._finish_reason,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            error=self.error,
            queue_ns=0 if called_ns is None else sent_ns - called_ns,
            reasoning_tokens=self._reasoning_tokens,
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
