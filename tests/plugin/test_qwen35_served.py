"""A tiny Qwen3.5 in every format, built by our command line and served by vLLM on one and on two tensor-parallel ranks.

Each layer is held against float64 on the inputs that it had in the served model, where only the rounding of its bf16
output separates the two; the whole model against transformers in float64, where the quantized activations do, since
rounding puts other values on the boundaries of their codes. PARO_LONG_TESTS=1 serves every format on both; else one on
each.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paroquant_gfx1201.modes import Mode
from tests.plugin import tiny_qwen, unsharded
from tests.plugin.conftest import relative

pytestmark = pytest.mark.vllm

LONG = "PARO_LONG_TESTS" in os.environ
INT8 = {"RADIANCE_PQ_I8": "1", "RADIANCE_PQ_PG": "1", "RADIANCE_PQ_ZPE": "1"}
ENVIRONMENTS = {"bf16": {}, "int4": {}, "int5": INT8, "lloyd": {}, "mxfp4": {}, "nvfp4": {"RADIANCE_NVFP4_MXFP4": "1"}}
CASES = [(name, ranks) for name in ENVIRONMENTS for ranks in (1, 2)] if LONG else [("nvfp4", 1), ("int5", 2)]
QUANTIZED = [case for case in CASES if case[0] != "bf16"]
PROMPTS = {"decode": 40, "prefill": 100}
"""Tokens: below and above RADIANCE_PQ_DECODE_MAX_M."""

LAYERS = 16
"""in_proj_qkvz or qkv_proj, out_proj or o_proj, gate_up_proj, down_proj: four in each of four blocks."""

ERROR = {1: 2.5e-3, 2: 4e-3}
"""Relative error of a layer by the ranks that it is summed over. 1.66e-3 is the rounding of one bf16 output, 2.46e-3
that of two and of their sum; the rest is room for activations on the boundary of two codes."""

KL_NATS = {"none": 1e-4, "int8": 1e-3, "e4m3": 5e-3}
"""KL of the served model against float64, by the element of activations: mean over a prompt, median of what follows."""

MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")


@dataclass(frozen=True)
class Served:
    """What one job left: a directory of serve_tiny's files."""

    name: str
    ranks: int
    checkpoint: Path
    out: Path

    def mode(self) -> Mode:
        return Mode.from_environment(ENVIRONMENTS[self.name])

    def attestations(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("attest-*.json"))]

    def by_rank(self) -> list[dict[str, torch.Tensor]]:
        return [load_file(self.out / f"rank-{rank}.safetensors") for rank in range(self.ranks)]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen") / "bf16"
    tiny_qwen.make(directory)
    return directory


@pytest.fixture(scope="module")
def served(bf16: Path) -> dict[tuple[str, int], Served]:
    """Every case of CASES, built and served in one go."""
    root = bf16.parent
    generator = torch.Generator().manual_seed(5)
    prompts = {name: torch.randint(0, 512, (count,), generator=generator).tolist() for name, count in PROMPTS.items()}
    found, jobs = {}, []
    for name, ranks in CASES:
        checkpoint = root / name
        if not checkpoint.exists():
            tiny_qwen.build(bf16, checkpoint, name)
        found[name, ranks] = Served(name, ranks, checkpoint, root / f"served-{name}-{ranks}")
        job = {"model": str(checkpoint), "ranks": ranks, "environment": ENVIRONMENTS[name], "prompts": prompts}
        jobs.append({**job, "out": str(found[name, ranks].out)})
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.plugin.serve_tiny", str(root / "jobs.json")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RADIANCE_")}
    with (root / "serve.log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=1800, check=False)
    logs = [path.read_text()[-2000:] for path in [root / "serve.log", *root.glob("served-*/rank-*.log")]]
    assert done.returncode == 0, "\n".join(logs)
    return found


def whole(case: Served, name: str, prompt: str, partitions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of a layer over all ranks, in the order of the unsharded projections."""
    ranks = [(seen[f"{name}|{prompt}|x"], seen[f"{name}|{prompt}|y"]) for seen in case.by_rank()]
    first_x, first_y = ranks[0]
    if name.endswith(ROW_PARALLEL):
        assert all(torch.equal(y, first_y) for _, y in ranks)
        return torch.cat([x for x, _ in ranks], 1), first_y
    assert all(torch.equal(x, first_x) for x, _ in ranks)
    parts = zip(*[y.split(partitions, 1) for _, y in ranks], strict=True)
    return first_x, torch.cat([torch.cat(part, 1) for part in parts], 1)


@pytest.mark.parametrize(("name", "ranks"), QUANTIZED)
def test_every_layer_gave_what_its_unsharded_projections_give(name: str, ranks: int, served) -> None:
    case = served[name, ranks]
    projections = unsharded.projections(case.checkpoint)
    layers = {layer["name"]: layer for layer in case.attestations()[0]["layers"]}
    for layer in layers:
        parent, _, last = layer.rpartition(".")
        parts = [projections[f"{parent}.{part}"] for part in MERGED.get(last, (last,))]
        split = ranks if last in ROW_PARALLEL else 1
        for prompt, count in PROMPTS.items():
            x, y = whole(case, layer, prompt, layers[layer]["partitions"])
            assert len(x) == count
            expected = torch.cat([unsharded.multiply(x, part, case.mode(), split) for part in parts], 1)
            assert y.shape == expected.shape
            assert relative(y, expected) < ERROR[split], (layer, prompt)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_model_is_the_one_that_the_dequantized_weights_make(name: str, ranks: int, served, bf16: Path) -> None:
    case = served[name, ranks]
    element = "none" if name == "bf16" else case.mode().element
    made = unsharded.model(case.checkpoint, bf16)
    for prompt, count in PROMPTS.items():
        found = load_file(case.out / f"served-{prompt}.safetensors")
        exact = unsharded.log_probabilities(made, found["tokens"])
        actual = found["log_probabilities"].double()
        assert actual.shape == exact.shape
        kl = (exact.exp() * (exact - actual)).sum(1)
        assert kl[: count - 1].mean() < KL_NATS[element], prompt
        # Generated tokens came out of single-token steps: other code, and no prompt to hide behind. They are six: one
        # whose logits lie close together would decide a mean.
        assert kl[count - 1 :].median() < KL_NATS[element], prompt


@pytest.mark.parametrize(("name", "ranks"), QUANTIZED)
def test_each_rank_attests_every_layer_and_names_the_rest(name: str, ranks: int, served) -> None:
    case = served[name, ranks]
    documents = case.attestations()
    assert len(documents) == ranks
    requantized = name == "nvfp4"
    gates = [f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in (0, 2)]
    for document in documents:
        layers = {layer["name"]: layer for layer in document["layers"]}
        assert len(layers) == LAYERS + len(gates) * requantized
        assert {layer["path"] for layer in layers.values()} == {"cpu_int8" if name == "int5" else "cpu_reference"}
        shares = [width // ranks for width in (256, 256, 512, 512)]
        assert layers["model.layers.0.linear_attn.in_proj_qkvz"]["partitions"] == shares
        assert layers["model.layers.1.self_attn.o_proj"]["in_features"] == 256 // ranks
        rest = [{"name": gate, "kind": "linear"} for gate in gates if not requantized]
        assert document["unquantized"] == [*rest, {"name": "lm_head", "kind": "lm_head"}]
        counts = {"nvfp4": {"expected": 26, "done": 26}, "bf16": {"expected": 4, "done": 4}}
        assert document["requantized"] == (counts if requantized else {})
    for rank in range(ranks):
        found = re.findall(
            r"linear layers: (\d+)/(\d+) on our kernel, (\d+) not", (case.out / f"rank-{rank}.log").read_text()
        )
        assert found == [("18", "18", "0") if requantized else ("16", "16", "2")]
