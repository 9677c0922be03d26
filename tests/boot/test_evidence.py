"""What a log and its processes prove."""

from __future__ import annotations

import pytest

from orchestrator import evidence
from orchestrator.records import EnvReading


def attested(plan, **changes):
    knobs = {k: v for k, v in plan.env.items() if k.startswith("RADIANCE_")}
    base = {"pid": 7, "nonce": "n", "plugin_sha256": plan.plugin.sha256, "knobs": knobs, "layers": []}
    return {**base, **changes}


LAYER = {"name": "model.layers.0.self_attn.qkv_proj", "bits": 5}


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("INFO [kv_cache_utils.py:1234] CPU KV cache size: 46,592 tokens, Maximum concurrency", 46592),
        ("INFO GPU KV cache size: 767,217 tokens", 767217),
        ("no such line", None),
    ],
)
def test_kv_tokens_come_from_vllms_own_line(line, tokens):
    assert evidence.kv_tokens(line) == tokens


def test_equal_environments_have_no_fault(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    assert evidence.env_faults(plan, [EnvReading(1, "api_server", plan.env)], [attested(plan)]) == []
    assert evidence.attestation_faults(plan, "n", [attested(plan, layers=[LAYER])]) == []


def test_a_knob_changed_in_one_process_is_named_with_every_value(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    readings = [
        EnvReading(1, "api_server", plan.env),
        EnvReading(2, "engine_core", {**plan.env, "RADIANCE_PQ_I8": "1"}),
    ]
    (fault,) = evidence.env_faults(plan, readings, [attested(plan)])
    assert fault == "RADIANCE_PQ_I8: the plan says '0', process 2 (engine_core) has '1', the plugin attests '0'"


def test_a_knob_that_only_the_plugin_sees_differently_is_named(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    seen = attested(plan)
    seen["knobs"]["RADIANCE_PQ_ZPE"] = "1"
    (fault,) = evidence.env_faults(plan, [EnvReading(1, "api_server", plan.env)], [seen])
    assert fault == "RADIANCE_PQ_ZPE: the plan says '0', every process has '0', the plugin in process 7 attests '1'"


def test_a_knob_that_the_container_engine_was_not_given_is_named_with_all_four_values(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    without = {name: value for name, value in plan.env.items() if name != "RADIANCE_PQ_I8"}
    readings, seen = [EnvReading(1, "api_server", without)], attested(plan)
    del seen["knobs"]["RADIANCE_PQ_I8"]
    (fault,) = evidence.env_faults(plan, readings, [seen], without)
    assert fault == (
        "RADIANCE_PQ_I8: the plan says '0', the container's inspect says 'none', process 1 (api_server) has 'none', "
        "the plugin in process 7 attests 'none'"
    )


def test_a_wrapper_that_changes_a_knob_after_the_engine_gave_it_is_named_with_all_four_values(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    changed = {**plan.env, "RADIANCE_PQ_I8": "1"}
    seen = attested(plan, knobs={**attested(plan)["knobs"], "RADIANCE_PQ_I8": "1"})
    (fault,) = evidence.env_faults(plan, [EnvReading(1, "api_server", changed)], [seen], plan.env)
    assert fault == (
        "RADIANCE_PQ_I8: the plan says '0', the container's inspect says '0', process 1 (api_server) has '1', "
        "the plugin in process 7 attests '1'"
    )


def test_a_knob_that_only_the_image_sets_is_a_fault(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    inspected = {**plan.env, "RADIANCE_SOMETHING": "1", "PYTHON_VERSION": "3.11", "RADIANCE_BOOT_NONCE": "n"}
    (fault,) = evidence.env_faults(plan, [EnvReading(1, "api_server", plan.env)], [attested(plan)], inspected)
    assert fault == "RADIANCE_SOMETHING: the image sets it to '1', the plan has no such knob"


def test_no_reading_and_no_attestation_is_a_fault_not_a_pass(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    assert "could be read" in evidence.env_faults(plan, [], [])[0]
    assert "attested nothing" in evidence.attestation_faults(plan, "n", [])[0]


def test_layers_of_other_bits_and_layers_where_none_should_be_are_faults(plan_of):
    quantized, plain = plan_of("+variant=int5", "box=cpu"), plan_of("+variant=bf16", "box=cpu")
    four = attested(quantized, layers=[{**LAYER, "bits": 4}])
    assert "has 4 bits, the plan says 5" in evidence.attestation_faults(quantized, "n", [four])[0]
    assert "not quantized" in evidence.attestation_faults(plain, "n", [attested(plain, layers=[LAYER])])[0]
    assert "no layer runs" in evidence.attestation_faults(quantized, "n", [attested(quantized)])[0]


def test_layers_that_were_to_be_requantized_and_were_not_are_a_fault(plan_of):
    plan = plan_of("+variant=nvfp4_mxfp4", "box=r9700x2")
    layer = {**LAYER, "bits": 4}
    all_done = {"nvfp4": {"expected": 112, "done": 112}, "fp8": {"expected": 8, "done": 8}}
    assert evidence.attestation_faults(plan, "n", [attested(plan, layers=[layer], requantized=all_done)]) == []
    one_short = {**all_done, "nvfp4": {"expected": 112, "done": 111}}
    (fault,) = evidence.attestation_faults(plan, "n", [attested(plan, layers=[layer], requantized=one_short)])
    assert fault.endswith("requantized 111 of 112 nvfp4 layers")


def test_another_boots_attestation_is_a_fault(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    (fault,) = evidence.attestation_faults(plan, "n", [attested(plan, nonce="older", layers=[LAYER])])
    assert "attests boot 'older', this one is 'n'" in fault


GOOD_LOG = """\
[radiance.paroquant] registered (pid 7)
[radiance.paroquant] rot stream installed: 64 input epilogues, 64 mid
[radiance.paroquant] linear layers: 256/256 on our kernel, 0 FORCED ONTO AITER
R4D: all-R4D decode(fused) path live
"""


def test_a_good_log_has_every_marker_and_a_line_that_is_gone_is_said(plan_of):
    plan = plan_of("+variant=int4", "box=r9700x2")
    assert evidence.marker_faults(plan, GOOD_LOG) == []
    (fault,) = evidence.marker_faults(plan, GOOD_LOG.replace("all-R4D decode(fused) path live", ""))
    assert fault.startswith("the log does not show that the fused decode path of R4D is in use")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[radiance.paroquant] linear layers: 112/304 on our kernel", "some quantized layers do not run"),
        ("linear layers: 256/256 on our kernel, 3 FORCED ONTO AITER", "layers run on AITER"),
        ("[radiance.paroquant] registration failed: ImportError()", "the plugin did not register"),
        ("radiance_gdn: falling back to FLA", "a kernel that the plan counts on is not there"),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore", "the engine died"),
    ],
)
def test_a_forbidden_line_is_shown_as_it_stands_in_the_log(plan_of, line, said):
    (fault,) = evidence.marker_faults(plan_of("+variant=int4", "box=r9700x2"), f"{GOOD_LOG}{line}\nmore\n")
    assert said in fault and line in fault and "more" not in fault


def test_nvfp4_layers_left_on_vllms_own_path_are_a_fault(plan_of):
    plan = plan_of("+variant=nvfp4_mxfp4", "box=r9700x2")
    live = "all-R4D decode(fused) path live\n"
    for plugin in ("radiance.mxfp4", "paroquant_gfx1201"):
        assert evidence.marker_faults(plan, live + f"[{plugin}] linear layers: 304/304 on our kernel\n") == []
        assert evidence.marker_faults(plan, live + f"[{plugin}] linear layers: 112/112 on our kernel\n")


@pytest.mark.parametrize("variant", ["int4", "int4_lloyd", "int5", "mxfp4_paro", "nvfp4_mxfp4"])
def test_the_plugins_own_layer_count_is_the_cpu_boxs_marker(plan_of, variant):
    plan = plan_of(f"+variant={variant}", "box=cpu")
    line = "[paroquant_gfx1201] linear layers: 120/120 on our kernel, 0 not quantized"
    assert evidence.marker_faults(plan, line) == []
    assert evidence.marker_faults(plan, "")
    assert evidence.marker_faults(plan, "[paroquant_gfx1201] linear layers: 119/120 on our kernel")


def test_the_end_of_a_log_is_shown_without_its_blank_lines():
    assert evidence.last_useful_lines("a\n\n  ^^^^\nb\n", 5) == "a\nb"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", "memory ran out"),
        ("RuntimeError: No HIP GPUs are available", "the server sees no GPU"),
        (
            "INFO [shm_broadcast.py:542] No available shared memory broadcast block found in 60 seconds.",
            "a worker hangs",
        ),
        ("[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "NCCL_PROTO=Simple"),
        ("Memory access fault by GPU node-1 on address 0x7f0000000000", "the GPU faulted"),
        ("ValueError: Model architectures ['Qwen9ForCausalLM'] are not supported for now", "architecture"),
        ("OSError: [Errno 98] Address already in use", "the port is taken"),
        ("INFO everything is fine", ""),
    ],
)
def test_a_known_cause_in_the_log_is_named(line, cause):
    said = evidence.hint(line)
    assert cause in said and bool(cause) == bool(said)
