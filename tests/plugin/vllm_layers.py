"""One vLLM layer at a time, without a server: fixtures and loading by the layers' own weight loaders."""

import contextlib
import logging
import os
from pathlib import Path

import pytest
import torch

from paroquant_gfx1201 import attest


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> None:
    """A one-process vLLM 'cluster' over a file, which its parameter classes insist on."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    logging.disable(logging.INFO)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file:///tmp/pq-{os.getpid()}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    Path(f"/tmp/pq-{os.getpid()}").unlink(missing_ok=True)
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    from paroquant_gfx1201.vllm_glue import linear, op

    monkeypatch.setattr(attest, "process", attest.Attestation())
    monkeypatch.setattr(linear, "progress", linear.Progress())
    monkeypatch.setenv("RADIANCE_PQ_I8", "1")
    op.process_mode.cache_clear()
    yield
    op.process_mode.cache_clear()


@contextlib.contextmanager
def rank(monkeypatch: pytest.MonkeyPatch, index: int, size: int):
    """Layers built inside believe they are rank ``index`` of ``size``."""
    from vllm.model_executor.layers import linear

    with monkeypatch.context() as patch:
        patch.setattr(linear, "get_tensor_model_parallel_rank", lambda: index)
        patch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: size)
        yield


def load(layer, weight, shard) -> None:
    """Load what ``weight.to_tensors`` writes, as a checkpoint of one projection."""
    load_tensors(layer, weight.to_tensors("p"), shard)


def load_tensors(layer, tensors: dict[str, torch.Tensor], shard) -> None:
    for name, tensor in tensors.items():
        param = getattr(layer, name.removeprefix("p."))
        if shard is None:
            param.weight_loader(param, tensor)
        else:
            param.weight_loader(param, tensor, shard)


@contextlib.contextmanager
def loading():
    """torch's default dtype is the model's while vLLM makes and prepares layers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(kind: type, *sizes, config, prefix: str, **more):
    """A linear layer of vLLM's, made as its loader makes it."""
    with loading():
        return kind(*sizes, bias=False, quant_config=config, prefix=prefix, **more)


def prepared(layer):
    with loading():
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def rotated_widths(layer) -> list[int]:
    """Outputs of each rotation of a prepared layer."""
    return layer.paroquant_layer.linear.widths


def run(layer, x: torch.Tensor) -> torch.Tensor:
    return layer.quant_method.apply(layer, x)


def tokens(count: int, width: int = 256) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).bfloat16()
