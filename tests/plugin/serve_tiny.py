"""Serve checkpoints one after the other with vLLM's offline engine: `python -m tests.plugin.serve_tiny JOBS.json`.

vLLM is imported once; each job runs in forked processes, one for each tensor-parallel rank, each with an engine of its
own as under torchrun. A job is {"model", "ranks", "environment", "prompts", "out"}. Under `out` come:
- `rank-R.safetensors`: for each of the plugin's layers and each prompt, the inputs and outputs of its first forward,
  `NAME|PROMPT|x` and `NAME|PROMPT|y`;
- `served-PROMPT.safetensors`: `tokens`, the prompt and what was generated greedily, and `log_probabilities`
  f32 [len(tokens) - 1, vocabulary] of each token but the first;
- `attest-PID.json`, the plugin's attestation, and `rank-R.log`.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

GENERATED = 6
OMP_BIND = "0|1"
TOKENS = 256
JOB_TIMEOUT_S = 600
"""On a machine that is shared; a job takes five seconds."""


def without_torchvision() -> None:
    """vLLM's Qwen3.5 module imports the vision model's, which imports torchvision; text needs nothing of it."""
    import transformers.image_utils

    if transformers.utils.is_torchvision_available():  # remembers the answer: the stand-ins do not change it
        return
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules.setdefault(name, types.ModuleType(name)).__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.transforms.v2"].functional = types.ModuleType("functional")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def executor(rank: int, port: int):
    """vLLM's executor for externally launched ranks, with a port in the name of its shared memory."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Rank(ExecutorWithExternalLauncher):
        def _distributed_args(self):
            return f"tcp://127.0.0.1:{port}", rank, rank

    return Rank


def serve(job: dict, rank: int, port: int) -> None:
    """One rank of one job."""
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    from paroquant_gfx1201.vllm_glue.linear import PathLinearMethod

    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=TOKENS,
        max_num_seqs=1,
        max_num_batched_tokens=TOKENS,
        max_logprobs=-1,
        tensor_parallel_size=job["ranks"],
        distributed_executor_backend=executor(rank, port) if job["ranks"] > 1 else None,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    seen, prompt = {}, ""

    def watch(model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(getattr(module, "quant_method", None), PathLinearMethod):
                module.register_forward_hook(lambda _, inputs, output, name=name: note(name, inputs[0], output[0]))

    def note(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        seen.setdefault(f"{name}|{prompt}|x", x.clone())
        seen.setdefault(f"{name}|{prompt}|y", y.clone())

    llm.apply_model(watch)
    parameters = SamplingParams(
        max_tokens=GENERATED, temperature=0, ignore_eos=True, prompt_logprobs=-1, logprobs=-1, detokenize=False
    )
    out = Path(job["out"])
    for prompt, tokens in job["prompts"].items():
        done = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)[0]
        rows = [*done.prompt_logprobs[1:], *done.outputs[0].logprobs]
        values = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
        served = torch.tensor([*tokens, *done.outputs[0].token_ids])
        if rank == 0:
            save_file({"tokens": served, "log_probabilities": values}, out / f"served-{prompt}.safetensors")
    save_file(seen, out / f"rank-{rank}.safetensors")


def run_rank(job: dict, rank: int, port: int) -> int:
    """The forked child; returns its exit status."""
    import traceback

    signal.alarm(JOB_TIMEOUT_S)
    log = os.open(Path(job["out"]) / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank that waits for another spins on its core
    os.environ.update(job["environment"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
    os.environ["RADIANCE_ATTEST_DIR"] = job["out"]
    try:
        serve(job, rank, port)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def finished(ranks: set[int]) -> bool:
    """Wait for the processes; the first that fails takes the others along, which would wait for it for ever."""
    good = True
    try:
        while ranks:
            child, status = os.waitpid(-1, 0)
            ranks.discard(child)
            if status and good:
                good = False
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
    except BaseException:
        for other in ranks:
            os.kill(other, signal.SIGKILL)
        raise
    return good


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_TARGET_DEVICE="cpu",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_CPU_OMP_THREADS_BIND=OMP_BIND,
        HF_HUB_OFFLINE="1",
    )
    without_torchvision()
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    # By class: by name, vLLM would import the module in another process, which has no stand-in for torchvision.
    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)
    failed = 0
    for job in json.loads(Path(sys.argv[1]).read_text()):
        Path(job["out"]).mkdir(parents=True)
        port, ranks = free_port(), []
        for rank in range(job["ranks"]):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os._exit(run_rank(job, rank, port))
        failed += not finished(set(ranks))
        for left in Path("/dev/shm").glob(
            f"{port}-tp:*-cpushm_*"
        ):  # of ranks that were killed, or end without a goodbye
            left.unlink(missing_ok=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
