"""The verbs of the HTTP API: the server, beside the scheduler's loop, and who may use it."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.verbs import schedule
from orchestrator.verbs.options import Options

SETTINGS = ("http.host", "http.port", "http.beyond_loopback", "http.names")


def serve(options: Options) -> int:
    """The loop of `schedule run` with the API beside it, until a signal ends both."""
    import threading
    from dataclasses import replace

    from orchestrator import config, detection, units
    from orchestrator.schedule.queue import Queue
    from orchestrator.service import app, context, moves, server, tokens

    own = dict(word.split("=", 1) for word in options.overrides if word.partition("=")[0] in SETTINGS)
    rest = tuple(word for word in options.overrides if word.partition("=")[0] not in SETTINGS)
    if unknown := [word for word in rest if not word.startswith(("paths.", "fleet="))]:
        raise UsageError(f"{unknown[0]}: serve takes fleet=, paths.* and {', '.join(SETTINGS)}")
    if options.units is not None:
        return schedule.run(replace(options, overrides=rest))
    paths = config.load_machine([word for word in rest if word.startswith("paths.")]).paths
    state, tracking = config.state_dir(paths), Path(paths.tracking).resolve()
    known = tokens.TokenFile(tokens.path_of(state))
    bound = server.listen(
        own.get("http.host", "127.0.0.1"), _port(own.get("http.port", str(server.PORT))),
        own.get("http.beyond_loopback", "false") == "true",
    )  # fmt: skip
    stop, move_wake, loop_wake = threading.Event(), threading.Event(), threading.Event()
    places = units.words(paths)

    def wake() -> None:
        move_wake.set()
        loop_wake.set()

    def say(line: str) -> None:
        print(line.translate(PRINTABLE), file=sys.stderr, flush=True)

    queue, kept = Queue(state), moves.Moves(state)
    hosts = server.hosts(bound, [name.lower() for name in own.get("http.names", "").split(",") if name])
    boxes = None if "fleet=ray" in rest else detection.present()
    service = context.Service(state, tracking, places, queue, kept, known, say, wake, stop.is_set, hosts, boxes)
    mover = moves.Mover(kept, queue, state, places, stop, move_wake, say)
    working = threading.Thread(target=mover.work, name="moves")
    host, port = bound.getsockname()[:2]
    with server.running(app.create(service), bound, stop, say):
        working.start()
        try:
            say(f"the API answers on http://{f'[{host}]' if ':' in host else host}:{port}")
            return schedule.run(replace(options, overrides=rest), loop_wake)
        finally:
            stop.set()
            wake()
            working.join()


PRINTABLE = dict.fromkeys((*range(32), 127, *range(128, 160)), "?")  # a log line is one line


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 65536:
        raise UsageError(f"http.port={text}: write a number from 1 to 65535; 0 takes a free one")
    return int(text)


def token_add(options: Options) -> int:
    from orchestrator.service import tokens

    name, own = _named(options, "token add NAME scopes=read,run")
    print(tokens.add(_file(options), name, [scope for scope in own.get("scopes", "").split(",") if scope]))
    print(f"token {name}: shown once; only its SHA-256 is kept in {_file(options)}", file=sys.stderr)
    return 0


def token_list(options: Options) -> int:
    from orchestrator.service import tokens

    for token in tokens.load(_file(options)):
        print(f"{token.name}  {','.join(token.scopes)}  {token.made_utc}")
    return 0


def token_remove(options: Options) -> int:
    from orchestrator.service import tokens

    name, _ = _named(options, "token remove NAME")
    tokens.remove(_file(options), name)
    print(f"token {name} is removed")
    return 0


def _named(options: Options, usage: str) -> tuple[str, dict[str, str]]:
    names = [word for word in options.overrides if "=" not in word]
    own = dict(word.split("=", 1) for word in options.overrides if "=" in word and not word.startswith("paths."))
    if len(names) != 1 or set(own) - {"scopes"}:
        raise UsageError(f"write it as in `{usage}`; scopes are read, run, promote")
    return names[0], own


def _file(options: Options) -> Path:
    from orchestrator import config
    from orchestrator.service import tokens

    words = [word for word in options.overrides if word.startswith("paths.")]
    return tokens.path_of(config.state_dir(config.load_machine(words).paths))
