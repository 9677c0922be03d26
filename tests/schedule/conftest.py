"""Two boxes for a night."""

from __future__ import annotations

import shutil
import socket
import sys
from dataclasses import replace

import pytest

from orchestrator import config
from orchestrator.recorded import mlflow_store
from tests.prod.conftest import STUB, Site, end

NAMES = ("left", "right")


@pytest.fixture
def boxes(tmp_path, plan_of):
    """Two boxes, each with files of its own and a prod that serves."""
    made = {}
    template = tmp_path / "template"
    mlflow_store.connect(template)
    for name in NAMES:
        root = tmp_path / name
        (root / "tracking").mkdir(parents=True)
        shutil.copyfile(template / "mlflow.db", root / "tracking" / "mlflow.db")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (root / "port").write_text(str(port))
        overrides = ["+variant=bf16", "box=cpu", f"box.port={port}"]
        plan = plan_of(*overrides)
        tail = plan.argv[plan.argv.index("--model") :]
        box = Site(root, plan, config.load(overrides))
        box.plan = replace(plan, argv=(sys.executable, str(STUB), *tail, "--broken", str(box.broken)))
        box.serve()
        made[name] = box
    yield made
    for box in made.values():
        for path in (box.state / "prod").glob("*/*"):
            end(path.name)
