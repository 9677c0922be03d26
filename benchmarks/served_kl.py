"""KL divergence of checkpoints from bf16 through the server: one row for each, all against one reference.

    python benchmarks/served_kl.py MODELS_DIR BF16 LABEL=CHECKPOINT:VARIANT[,KEY=VALUE...] ... [--tracking DIR]

Each row is `python -m orchestrator` with that variant on box cpu and the kld bench alone, eager, where the checkpoint
is the directory of this name below MODELS_DIR, as a user's own checkpoints are; BF16 is the directory of the reference.
So every layer is attested, and every run has a reference of its own stack, made by the first. The table goes to stdout;
a row whose run fails is shown as failed and sets exit status 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from orchestrator.labels import BENCHES
from orchestrator.recorded import catalog

TIMEOUT_S = 3600
CORPORA = ("prose", "code")


@dataclass(frozen=True)
class Row:
    """`overrides` come after the variant."""

    label: str
    checkpoint: str
    variant: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Row:
        label, equals, rest = text.partition("=")
        checkpoint, colon, words = rest.partition(":")
        variant, *overrides = words.split(",")
        if not (label and equals and checkpoint and colon and variant):
            raise argparse.ArgumentTypeError(f"{text!r}: write LABEL=CHECKPOINT:VARIANT[,KEY=VALUE...]")
        return cls(label, checkpoint, variant, tuple(overrides))


def weights_of(variant: str, box: str = "cpu") -> str:
    """The name of a variant's weights, by which a model finds its checkpoint."""
    from orchestrator import config

    return config.load([f"+variant={variant}", f"box={box}"]).variant.weights.name


def command(row: Row, models: Path, bf16: str, tracking: Path, documents: int) -> list[str]:
    weights = weights_of(row.variant)
    names = f"bf16: {bf16}" + ("" if weights == "bf16" else f", {weights}: {row.checkpoint}")
    dropped = [f"~suite.benches.{name}" for name in BENCHES if name != "kld"]
    return [
        *(sys.executable, "-m", "orchestrator", f"+variant={row.variant}", "box=cpu", "suite=quick", *dropped),
        *(f"suite.benches.kld.documents={documents}", "+box.serve.enforce-eager=true", f"paths.tracking={tracking}"),
        *("box.model.source=null", "box.model.quantize=null"),
        *(f"+box.model.checkpoints={{{names}}}", f"+box.models_dir={models}", *row.overrides),
    ]


def line(row: Row, metrics: dict[str, float]) -> str:
    """One row of the table; raises KeyError where a metric is missing."""
    cells = []
    for corpus in CORPORA:
        mean, floor = metrics[f"kl.mean_nats.{corpus}"], metrics[f"kl.floor_nats.{corpus}"]
        p99, top1 = metrics[f"kl.p99_nats.{corpus}"], metrics[f"kl.top1_agreement.{corpus}"]
        cells.append(f"{mean:.4f} | {p99:.3f} | {top1:.1%} | {floor:.4f}")
    both = sum(metrics[f"kl.mean_nats.{corpus}"] for corpus in CORPORA) / len(CORPORA)
    return f"| {row.label} | {both:.4f} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("bf16")
    parser.add_argument("rows", nargs="+", type=Row.parse)
    parser.add_argument("--documents", type=int, default=12, help="of each corpus, 512 tokens each")
    parser.add_argument("--tracking", type=Path, help="keep the runs here")
    given = parser.parse_args()
    tracking = (given.tracking or Path(tempfile.mkdtemp(prefix="served-kl-"))).absolute()
    print("| served | KL, nats | prose: KL | p99 | top-1 | floor | code: KL | p99 | top-1 | floor |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    failed = 0
    for row in given.rows:
        words = command(row, given.models.absolute(), given.bf16, tracking, given.documents)
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode == 0:
            print(line(row, dict(catalog.entries(tracking)[0].metrics)), flush=True)
        else:
            failed += 1
            last = (done.stderr.strip().splitlines() or [""])[-1]
            print(f"| {row.label} | failed: {last} |", flush=True)
    print(f"\nruns in {tracking}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
