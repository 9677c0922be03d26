"""A store with a simulated A/B, single runs and published results: `python -m tests.report.a_store DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator import shipped
from orchestrator.abtest import ab_run
from orchestrator.pages import report
from orchestrator.recorded import ledger
from orchestrator.recorded.tracking import Tracker
from orchestrator.records import to_jsonable
from tests.ab.simulated import World
from tests.boot.test_boot import free_port
from tests.report import madeup, simulated_ab


def fill(root: Path, patch=setattr) -> Path:
    """Make it under `root`; returns its directory."""
    world = World(root, b_better=0.05, also=simulated_ab.also).install(patch)
    ab_run.start(world.test(port=free_port(), about="what the page looks like"), ["box=cpu"], quiet=True)
    directory = root / "tracking"
    tracker = Tracker(directory, "cpu")
    for number, name in enumerate(("int4", "int5")):
        tags = {"box": "cpu", "stack": "s", "source": "simulated", "verdict": "OK", "variant": name}
        run = tracker.start(name, {"variant.name": name}, tags)
        run.log_json("plan.json", madeup.PLAN | {"variant": name, "port": 8100 + number})
        for boot in madeup.boots():
            run.log_json(f"boots/{boot.nonce}-{boot.purpose}/boot.json", to_jsonable(boot))
        measured = (madeup.decode(), madeup.prefill(), madeup.kld(), madeup.word_problems())
        for found in measured:
            run.log_measurement(found)
        run.log_text("report.html", report.render(madeup.run(run_id=run.run_id, measurements=measured)))
        run.finish("FINISHED")
    sources = ledger.read(shipped.experiments_dir() / "ledger")
    ledger.import_all(sources, Tracker(directory, ledger.EXPERIMENT))
    return directory


if __name__ == "__main__":
    print(fill(Path(sys.argv[1])))
