"""A checkpoint written by the code of PyPI `paroquant`, with that code's own reading of it.

    VENV_WITH_PAROQUANT/bin/python benchmarks/format_identity.py OUT_DIR

Needs paroquant==0.1.16 and torch. Two small layers of random weights go through `PseudoQuantizedLinear`, random angles
and channel scales set, and `cli.convert._quantize_layer`. OUT_DIR gets `model.safetensors` and `config.json` as
`cli.convert` writes them, and `theirs.safetensors`: for each layer the rotated-domain weight by
`UniformAffineQuantizer.pseudo_quantize` from the saved state (`rotated`, f32 [N, K]), inputs (`x`, f32 [M, K]) and the
inputs after their rotation op with the stored theta, pairs and channel scales (`x_rotated`).

With an NVIDIA GPU and nvcc the rotation is their CUDA kernel. Elsewhere a plain torch loop, below, stands in for that
one op, `manifest.json` says so, and everything else is still theirs. tests/plugin/test_identity.py compares.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = {
    "model.layers.0.mlp.up_proj": (256, 64, 128, 4),
    "model.layers.0.mlp.down_proj": (128, 96, 64, 4),
}
"""K, N, group size, bits."""
KROT = 8
TOKENS = 16


def stand_in_rotation() -> None:
    """Provide torch.ops.rotation.rotate and the module that would compile it."""

    def rotate(x, idx_ij, theta, scales=None, group_size=128):
        y = x if scales is None else x * scales.reshape(-1).to(x.dtype)
        base = torch.arange(x.shape[-1] // group_size, device=x.device).repeat_interleave(group_size) * group_size
        for r in range(idx_ij.shape[0]):
            index = idx_ij[r].long() + base
            i, j = index[0::2], index[1::2]
            cos, sin = theta[r].to(x.dtype).cos(), theta[r].to(x.dtype).sin()
            out = y.clone()
            out[..., i] = cos * y[..., i] + sin * y[..., j]
            out[..., j] = cos * y[..., j] - sin * y[..., i]
            y = out
        return y

    library = torch.library.Library("rotation", "DEF")
    library.define("rotate(Tensor x, Tensor idx_ij, Tensor theta, Tensor? scales=None, int group_size=128) -> Tensor")
    library.impl("rotate", rotate, "CompositeExplicitAutograd")
    module = types.ModuleType("paroquant.kernels.cuda")
    module.scaled_pairwise_rotation = torch.ops.rotation.rotate
    module.keep = library  # the definition lives as long as the object
    sys.modules["paroquant.kernels.cuda"] = module


def unneeded(name: str, **members: object) -> None:
    """A module that paroquant imports at its top and that this script never reaches."""
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules.setdefault(name, module)


def main(out: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, members in (
        ("datasets", {"load_dataset": None}),
        ("tqdm", {"tqdm": lambda iterable=None, **_: iterable}),
        ("transformers", dict.fromkeys(
            ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig", "AutoModelForImageTextToText")
        )),
    ):  # fmt: skip
        try:
            __import__(name)
        except ImportError:
            unneeded(name, **members)
    if device == "cpu":
        stand_in_rotation()
    from paroquant.cli.convert import _quantize_layer
    from paroquant.optim.qlinear import PseudoQuantizedLinear
    from paroquant.optim.quantizer import UniformAffineQuantizer
    from paroquant.optim.rotation import transform_to_kernel_data
    from paroquant.optim.train import get_random_rotation_pairs

    written: dict[str, torch.Tensor] = {}
    theirs: dict[str, torch.Tensor] = {}
    out.mkdir(parents=True, exist_ok=True)
    for seed, (name, (inputs, outputs, group, bits)) in enumerate(LAYERS.items()):
        torch.manual_seed(seed)
        linear = torch.nn.Linear(inputs, outputs, bias=seed == 1, device=device)
        linear.weight.data.normal_(std=0.05)
        pairs = get_random_rotation_pairs(torch.zeros(inputs // group, group), group, KROT, 0.5, seed)
        pairs = [torch.tensor(rotation) for rotation in pairs]
        angles = [(torch.rand(len(rotation)) - 0.5) * 6 for rotation in pairs]
        data = [tensor.to(device) for tensor in transform_to_kernel_data(pairs, angles, group)]
        cs = torch.exp(torch.randn(1, inputs) * 0.3).half().to(device)
        krot = torch.tensor(KROT, device=device)
        layer = PseudoQuantizedLinear(linear, data, cs, group_size=group, n_bits=bits, num_rotations=krot).to(device)
        layer.set_optim_enabled(quantizer=True)
        layer = layer.half()  # as their optimizer saves it
        state = layer.state_dict()
        with torch.no_grad():
            buffers, bits, group, krot = _quantize_layer(state, device)
            written |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in buffers.items()}
            weight = (state["weight"].float() * state["channel_scales"].float()).contiguous()
            rotate = torch.ops.rotation.rotate
            pairs, theta = state["pairs_grouped"], state["angles_grouped"].float()
            rotated = rotate(weight, pairs, theta, None, group)
            scale, zero = (state[f"quantizer.{part}"].float() for part in ("scale", "zero_point_float"))
            theirs[f"{name}.rotated"] = UniformAffineQuantizer.pseudo_quantize(rotated, bits, group, scale, zero).cpu()
            x = torch.randn(TOKENS, inputs).to(device)
            stored = [buffers[part].to(device) for part in ("pairs", "theta", "channel_scales")]
            x_rotated = rotate(x, stored[0], stored[1].float(), stored[2].float(), group)
            theirs[f"{name}.x"], theirs[f"{name}.x_rotated"] = x.cpu(), x_rotated.cpu()
        # A model has one group size; the second layer is a second model.
        directory = out / str(group)
        directory.mkdir(exist_ok=True)
        mine = {key: tensor for key, tensor in written.items() if key.startswith(name)}
        save_file(mine, directory / "model.safetensors", metadata={"format": "pt"})
        save_file(
            {k: t.contiguous() for k, t in theirs.items() if k.startswith(name)}, directory / "theirs.safetensors"
        )
        config = {"quant_method": "paroquant", "bits": bits, "group_size": group, "krot": krot}
        (directory / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")
    manifest = {
        "paroquant": version("paroquant"),
        "torch": torch.__version__,
        "rotation": torch.cuda.get_device_name() + ", their kernel" if device == "cuda" else "stand-in loop in torch",
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
