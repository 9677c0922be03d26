"""Clients of prod: they stream answers one after another, without a pause, and know of each how it ended."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

REFUSED_PAUSE_S = 0.05  # before a client that found nobody asks again
TIMEOUT_S = 300.0
PROMPT = "Once upon a time, in a village by the sea,"


@dataclass(frozen=True)
class Answer:
    """`first_s` is when its first text came (None: none did), by the monotonic clock like the others.

    `whole`: with [DONE] and a finish reason. `cut`: it had begun and did not end. `refused`: nobody took the request,
    or it was turned away before any of an answer was there; `why` says how.
    """

    began_s: float
    ended_s: float
    first_s: float | None
    how: str
    why: str = ""


@dataclass
class Client:
    """Asks for the model by its plain name, as who knows nothing of boots does."""

    port: int
    model: str
    tokens: int
    stop: threading.Event
    answers: list[Answer] = field(default_factory=list)

    def work(self) -> None:
        while not self.stop.is_set():
            answer = self.ask()
            self.answers.append(answer)
            if answer.how == "refused":
                time.sleep(REFUSED_PAUSE_S)

    def ask(self) -> Answer:
        began_s, first_s, finished, why = time.monotonic(), None, False, ""
        asked = {"model": self.model, "prompt": PROMPT, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                why = f"status {answer.status}"
            while answer.status == 200 and (line := answer.readline()):
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return Answer(began_s, time.monotonic(), first_s, "whole" if finished else "cut", "no finish")
                event = json.loads(line[6:])
                if "error" in event:
                    why = f"error event: {event['error']}"
                    continue
                choice = event["choices"][0]
                first_s = first_s or time.monotonic()
                finished = finished or choice["finish_reason"] == "length"
                why = why or (f"finish reason {choice['finish_reason']}" if choice["finish_reason"] else "")
        except (OSError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        return Answer(began_s, time.monotonic(), first_s, "refused" if first_s is None else "cut", why)


@dataclass(frozen=True)
class Seen:
    """What all clients saw."""

    answers: Sequence[Answer]

    def of(self, how: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.how == how]

    def gap_s(self, at_s: float) -> float:
        """From the last text of the last whole answer that began before `at_s` to the first text of the first that
        began after it."""
        whole = self.of("whole")
        before = [answer.ended_s for answer in whole if answer.began_s < at_s]
        after = [answer.first_s for answer in whole if answer.began_s >= at_s]
        return min(after) - max(before)


@contextmanager
def asking(port: int, model: str, clients: int = 2, tokens: int = 48) -> Iterator[list[Client]]:
    """So many clients ask during the block; afterwards each has ended its last answer."""
    stop = threading.Event()
    made = [Client(port, model, tokens, stop) for _ in range(clients)]
    threads = [threading.Thread(target=client.work, daemon=True) for client in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)


def seen(clients: Sequence[Client]) -> Seen:
    return Seen(sorted((answer for client in clients for answer in client.answers), key=lambda answer: answer.began_s))
