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
    assert fault == "RADIANCE_PQ_I8: the plan says '0', process 2 (engine_core) has '1'"


def test_a_knob_that_only_the_plugin_sees_differently_is_named(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    seen = attested(plan)
    seen["knobs"]["RADIANCE_PQ_ZPE"] = "1"
    (fault,) = evidence.env_faults(plan, [EnvReading(1, "api_server", plan.env)], [seen])
    assert fault == "RADIANCE_PQ_ZPE: the plan says '0', the plugin in process 7 attests '1'"


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


def test_another_boots_attestation_is_a_fault(plan_of):
    plan = plan_of("+variant=int5", "box=cpu")
    (fault,) = evidence.attestation_faults(plan, "n", [attested(plan, nonce="older", layers=[LAYER])])
    assert "attests boot 'older', this one is 'n'" in fault


def test_the_end_of_a_log_is_shown_without_its_blank_lines():
    assert evidence.last_useful_lines("a\n\n  ^^^^\nb\n", 5) == "a\nb"
