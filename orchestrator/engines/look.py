"""Runs inside a container, sent as text to the image's own Python: what the kernel says of the boot's processes.

usage: python -c TEXT NAME NONCE KEYS - a JSON list of the processes whose variable NAME is NONCE, with the variables
named in KEYS (a JSON list). Works without rights on the host, and needs nothing but the standard library.
"""

import json
import os
import signal
import sys
from pathlib import Path


def processes(name: str, nonce: str, keys: set[str]) -> list[dict]:
    """Each process but this one: pid, command line, short name, environment and largest resident set."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            pairs = [item.partition("=") for item in _text(entry / "environ").split("\0")]
            command = _text(entry / "cmdline").replace("\0", " ")
            status = dict(line.partition(":")[::2] for line in _text(entry / "status").splitlines())
        except OSError:
            continue
        env = {key: value for key, _, value in pairs}
        if env.get(name) == nonce:
            found.append(
                {
                    "pid": int(entry.name),
                    "command": command,
                    "name": status["Name"].strip(),
                    "env": {key: value for key, value in env.items() if key in keys},
                    "peak_rss_bytes": int(status.get("VmHWM", "0 kB").split()[0]) * 1024,
                }
            )
    return found


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


if __name__ == "__main__":
    signal.alarm(20)  # a read that hangs must not stay behind in the container
    print(json.dumps(processes(sys.argv[1], sys.argv[2], set(json.loads(sys.argv[3])))))
