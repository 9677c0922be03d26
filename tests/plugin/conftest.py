"""Shared inputs: a small real-shaped projection and a tiny model directory."""

import json
from pathlib import Path

import pytest
import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.fit import quantize_rotated
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.spec import FormatSpec


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_projection(bits: int, inputs: int = 192, outputs: int = 96, seed: int = 0) -> Projection:
    """A quantized projection under random angles and channel scales, group size 64, krot 8."""
    spec = FormatSpec(bits, 64, 8)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05
    theta = ((torch.rand(8, inputs // 2, generator=generator) - 0.5) * 6).half()
    channel_scales = torch.exp(torch.randn(1, inputs, generator=generator) * 0.3).half()
    pairs = rotation.greedy_pairs(inputs, 64, 8, seed)
    return quantize_rotated(weight, theta, channel_scales, pairs, spec)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``, in float64."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a byte-level tokenizer, hidden size 128."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    assert json.loads((directory / "config.json").read_text())["hidden_size"] == 128
    return directory


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few thousand bytes."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(f"The number {n} is followed by {n + 1}. " for n in range(120)))
    return path


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gfx1201 code objects, as a wheel has them."""
    from paroquant_gfx1201.kernels.hip import codeobject

    directory = tmp_path_factory.mktemp("objects")
    codeobject.build(directory)
    return directory
