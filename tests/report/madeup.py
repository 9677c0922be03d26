"""A made-up run: its numbers are invented, its shapes are those of the benches."""

from __future__ import annotations

from typing import Any

from orchestrator.records import Boot, EnvReading, Measurement

ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "RADIANCE_PAROQUANT": "1",
    "RADIANCE_PQ_I8": "1",
    "RADIANCE_PQ_PG": "1",
    "RADIANCE_PQ_ZPE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CACHE_ROOT": "/var/cache/made-up/serve/0123456789abcdef/vllm",
}
PLAN: dict[str, Any] = {
    "variant": "int5_i8_pg_zpe",
    "box": "cpu",
    "engine": "process",
    "image": "process:/usr/bin/python3",
    "port": 8100,
    "argv": [
        "python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/var/cache/made-up/models/int5",
        "--dtype",
        "bfloat16",
    ],
    "env": ENV,
    "cache_dir": "/var/cache/made-up/serve/0123456789abcdef",
    "fingerprint": "89abcdef01234567",
    "stack": {"fingerprint": "fedcba9876543210", "facts": {}},
    "checkpoint": {"path": "/var/cache/made-up/models/int5", "recipe_id": "0011"},
}
CATEGORIES = {
    "code": 41.2, "reasoning": 40.1, "prose": 39.4, "json": 42.6,
    "file_edit": 38.2, "summarization": 36.9, "math": 40.7, "chat": 41.0,
}  # fmt: skip


def made(bench: str, metrics: dict[str, float], samples: tuple = (), **changes: Any) -> Measurement:
    values = {
        "bench": bench, "status": "ok", "reason": "", "metrics": metrics, "samples": samples, "config": {},
        "corpora": {"prose": "ab" * 32}, "notes": (), "started_at_utc": "2026-01-02T03:04:05+00:00", "duration_s": 61.0,
    }  # fmt: skip
    return Measurement(**values | changes)


def decode() -> Measurement:
    steps = {32: 23.1, 512: 24.0, 2048: 27.9}
    metrics = {"decode.errors": 0.0, "decode.skipped": 0.0}
    for context, step_ms in steps.items():
        metrics |= {
            f"decode.ms_per_step.ctx{context}": step_ms,
            f"decode.tok_per_s.ctx{context}": 1e3 / step_ms,
            f"decode.ttft_ms.ctx{context}": 30 + context / 2,
            f"decode.longest_gap_ms.ctx{context}": 2 * step_ms,
        }
    samples = tuple(
        {
            "context_tokens": context,
            "repeat": n,
            "update_ms": [50.0 + step_ms * change * i for i in range(4)],
            "error": "",
        }
        for context, step_ms in steps.items()
        for n, change in enumerate((0.97, 1.0, 1.05))
    )
    return made("decode_ctx", metrics, samples)


def prefill() -> Measurement:
    rates = {256: 640.0, 1024: 902.0, 2048: 861.0}
    metrics = {"prefill.errors": 0.0, "prefill.skipped": 0.0}
    for length, rate in rates.items():
        metrics[f"prefill.prompt_tok_per_s.len{length}"] = rate
        metrics[f"prefill.prompt_tok_per_s.best.len{length}"] = rate * 1.02
        metrics[f"prefill.ttft_ms.len{length}"] = 1e3 * length / rate
    samples = tuple(
        {
            "length_tokens": length,
            "run": n,
            "warmup": n == 0,
            "update_ms": [1e3 * length / (rate * change)],
            "error": "",
        }
        for length, rate in rates.items()
        for n, change in enumerate((0.6, 0.98, 1.0, 1.02))
    )
    return made("prefill", metrics, samples, notes=("len4096 skipped: over the window of 4096 tokens",))


def betterbench() -> Measurement:
    metrics = {"betterbench.errors": 0.0, "betterbench.short_outputs": 2.0, "betterbench.combined_tok_per_s": 39.9}
    metrics |= {f"betterbench.decode_tok_per_s.{name}": rate for name, rate in CATEGORIES.items()}
    for level, rate, ttft_ms, itl_ms in ((1, 37.5, 118.0, 24.1), (4, 96.3, 391.0, 38.0)):
        metrics |= {
            f"betterbench.aggregate_tok_per_s.conc{level}": rate,
            f"betterbench.ttft_ms.p50.conc{level}": ttft_ms,
            f"betterbench.ttft_ms.p99.conc{level}": 2 * ttft_ms,
            f"betterbench.itl_ms.p50.conc{level}": itl_ms,
            f"betterbench.itl_ms.p99.conc{level}": 2 * itl_ms,
            f"betterbench.achieved_concurrency.conc{level}": level * 0.97,
        }
    return made("betterbench", metrics, ({"prompt_id": "code-01"},) * 16, corpora={"prompts": "cd" * 32})


def word_problems(text: str = "He has 20 + 6 = 26 marbles.") -> Measurement:
    metrics = {
        "word_problems.errors": 0.0, "word_problems.truncated": 3.0,
        "word_problems.accuracy_flexible": 0.25, "word_problems.accuracy_flexible_n": 60.0,
        "word_problems.accuracy_strict": 0.15, "word_problems.accuracy_strict_n": 60.0,
    }  # fmt: skip
    wrong = {
        "id": "wp-002", "answer": "20 - 6 = 14 marbles are left.\n#### 14",
        "completion": text, "finish_reason": "stop", "error": "",
        "extracted_strict": None, "extracted_flexible": "26", "correct_strict": False, "correct_flexible": False,
    }  # fmt: skip
    right = wrong | {"id": "wp-001", "completion": "12", "correct_flexible": True}
    return made(
        "gsm8k", metrics, (right, wrong), config={"source": "own", "n": 60}, corpora={"word_problems": "ef" * 32}
    )


def kld() -> Measurement:
    metrics = {"kl.errors": 0.0}
    for name, mean, floor in (("prose", 0.0213, 0.0004), ("code", 0.0147, 0.0003)):
        metrics |= {
            f"kl.mean_nats.{name}": mean,
            f"kl.mean_nats.{name}.ci_low": mean * 0.9,
            f"kl.mean_nats.{name}.ci_high": mean * 1.12,
            f"kl.median_nats.{name}": mean / 3,
            f"kl.p99_nats.{name}": mean * 9,
            f"kl.top1_agreement.{name}": 0.943,
            f"kl.coverage.{name}": 0.981,
            f"kl.positions.{name}": 6132.0,
            f"kl.floor_nats.{name}": floor,
        }
    return made("kld", metrics, ({"document": 0},) * 24)


def boots() -> list[Boot]:
    attestation = {
        "pid": 4321,
        "nonce": "bbbb",
        "plugin_sha256": "1234567890abcdef" * 4,
        "knobs": {},
        "layers": [
            {"name": f"model.layers.{n}.mlp.down_proj", "bits": 5, "path": "int8 per group", "group_size": 64}
            for n in range(120)
        ],
        "mode": {"element": "int8", "prefill_granularity": "group"},
        "unquantized": [
            {"name": "lm_head", "kind": "ParallelLMHead"},
            {"name": "model.embed_tokens", "kind": "VocabParallelEmbedding"},
        ],
    }
    read = tuple(EnvReading(pid, role, ENV) for pid, role in ((4320, "api_server"), (4321, "engine_core")))
    started = "2026-01-02T03:00:00+00:00"
    return [
        Boot(
            "aaaa", "warmup", PLAN["fingerprint"], "cold", started,
            boot_s=72.4, rss_peak_bytes=3_100_000_000, compiled_files=212,
        ),
        Boot(
            "bbbb", "measured", PLAN["fingerprint"], "warm", started,
            boot_s=28.6, kv_tokens=46_592, rss_peak_bytes=2_700_000_000, compiled_files=0,
            processes=read, attestations=(attestation,),
        ),
    ]  # fmt: skip


def run(**changes: Any) -> dict[str, Any]:
    """The whole run, as the command line hands it to the report."""
    return {
        "run_id": "made-up-run", "status": "ok", "reasons": [], "plan": PLAN, "boots": boots(),
        "measurements": [decode(), prefill(), betterbench(), word_problems(), kld()],
        "notes": ["Every number on this page is made up, to look at the page."],
    } | changes  # fmt: skip
