"""The plan: complete, pure, and different where and only where the variant is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import knobs, plan
from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable, to_jsonable

VARIANTS = ("bf16", "int4", "int4_i8_pg_zpe", "int5", "int5_i8", "int5_i8_pg", "int5_i8_pg_zpe")
R9700X2 = ("box=r9700x2", "speculation@variant.speculation=dflash7")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_box_has_a_plan_that_survives_json(plan_of, variant):
    made = plan_of(f"+variant={variant}", "box=cpu")
    assert from_jsonable(plan.ServePlan, json.loads(json.dumps(to_jsonable(made)))) == made
    assert made.quantized == (variant != "bf16")


def test_the_json_has_the_documented_top_level_keys(plan_of):
    data = json.loads(plan.as_json(plan_of("+variant=int5_i8_pg_zpe", "box=cpu")))
    assert {"port", "env", "argv", "image", "cache_dir", "fingerprint"} <= data.keys()


def test_the_env_states_every_knob_and_inherits_nothing(plan_of, monkeypatch):
    monkeypatch.setenv("STRAY_VARIABLE", "1")
    env = plan_of("+variant=int5", "box=cpu").env
    assert knobs.REGISTRY.keys() <= env.keys() and "STRAY_VARIABLE" not in env


def test_rendering_twice_gives_the_same_fingerprint(plan_of):
    assert plan_of("+variant=int5", "box=cpu") == plan_of("+variant=int5", "box=cpu")


@pytest.mark.parametrize(
    "override",
    ["+variant.knobs.RADIANCE_PQ_ZPE=1", "+variant.serve.max-num-seqs=4", "box.serve.max-model-len=2048"],
)
def test_whatever_can_change_a_compiled_graph_changes_the_cache_directory(plan_of, override):
    base, other = plan_of("+variant=int5", "box=cpu"), plan_of("+variant=int5", "box=cpu", override)
    assert base.cache_dir != other.cache_dir and base.fingerprint != other.fingerprint


def test_another_plugin_build_or_stack_gets_another_cache_directory(machine, tmp_path, no_checkpoint):
    from orchestrator import config

    build, stack = machine
    experiment = config.load(["+variant=int5", "box=cpu"])
    dirs = {
        plan.render(experiment, no_checkpoint, b, tmp_path, s, tmp_path).cache_dir
        for b in (build, replace(build, sha256="d" * 64))
        for s in (stack, replace(stack, fingerprint="other"))
    }
    assert len(dirs) == 4


def test_a_boot_adds_its_nonce_and_nothing_else(plan_of, tmp_path):
    made = plan_of("+variant=int5", "box=cpu")
    argv, env, name = plan.with_nonce(made, "abc123", tmp_path)
    at = argv.index("--served-model-name")
    assert argv[at + 1] == name and argv[at + 2].startswith("--") and name == f"{made.served_model}@abc123"
    assert made.served_model not in argv, "who asks for the model by its plain name gets no measured boot"
    assert "--shutdown-timeout" not in argv
    prods, _, same = plan.with_nonce(made, "abc123", tmp_path, prod_grace_s=60.0)
    assert prods[at + 1 : at + 3] == (made.served_model, name) and same == name
    assert prods[-2:] == ("--shutdown-timeout", "45")
    assert set(argv) - set(made.argv) == {name}
    assert {k: v for k, v in env.items() if k not in made.env} == {
        "RADIANCE_BOOT_NONCE": "abc123",
        "RADIANCE_ATTEST_DIR": str(tmp_path),
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+variant.serve.port=1", "port is the plan's to set"),
        ("variant.speculation.tokens=3", "without a method"),
        ("variant.speculation.method=ngram", "needs at least 1"),
        ("+variant.serve.x=[1]", "not a plain value"),
        ("+variant.serve.x=nan", "not a plain value"),
        ("+variant.serve.x=''", "x is empty"),
        ("+variant.serve.served_model_name=x", "served_model_name is the plan's to set"),
        ("+variant.serve.served-model=x", "served-model is the plan's to set"),
        ("+variant.serve.api_key=x", "api_key is refused: the benches send none"),
        ("+box.serve.api-key=x", "box.serve: api-key is refused"),
        ("+variant.serve.hf-token=x", "name HF_TOKEN in box.env_secret"),
        ("+variant.serve.max-num-seqs=abc", "max-num-seqs='abc' is no count; write a whole number of at least 1"),
        ("+variant.serve.max_num_seqs=abc", "max-num-seqs='abc' is no count"),
        ("+variant.serve.max-num-seqs=true", "max-num-seqs=True is no count"),
        ("+variant.serve.max-model-len=0", "max-model-len=0 is no count"),
        ("box.serve.max-num-seqs=1.5", "box.serve: max-num-seqs=1.5 is no count"),
        ("+variant.serve.gpu-memory-utilization=2", "is no fraction"),
        ("+variant.serve.max-num-seqs=2 +variant.serve.max_num_seqs=2", "max-num-seqs is there twice"),
        ("+box.serve.max_num_seqs=2", "box.serve: max-num-seqs is there twice"),
        ("+box.env.PATH=/x", "PATH is the plan's to set"),
        ("+box.env.VLLM_CACHE_ROOT=/x", "VLLM_CACHE_ROOT is the plan's to set"),
        ("+box.env.RADIANCE_BOOT_NONCE=x", "RADIANCE_BOOT_NONCE is the plan's to set"),
        ("+box.env.RADIANCE_PQ_I9='1'", "there is no knob RADIANCE_PQ_I9; did you mean RADIANCE_PQ_I8"),
        ("+box.env.VLLM_ANY=", "VLLM_ANY is empty"),
        ("+box.env.HF_TOKEN=hf_x", "looks like a secret; export it and name it in box.env_secret"),
        ("+box.env.VLLM_API_KEY=x", "looks like a secret"),
        ("+box.env.db_password=x", "looks like a secret"),
        ("+box.env_secret=[PATH]", "PATH is the plan's to set"),
        ("+box.env_secret=[A,A]", "A is there twice"),
        ("+box.env_secret=[VLLM_API_KEY]", "the benches send no key"),
        ("+box.env_secret=['A=B']", "is no name of a variable"),
        ("box.formats=[bf16,mxfp4-paro]", "box cpu cannot serve int5-bitplane weights .* it serves bf16, mxfp4-paro"),
        ("weights@variant.weights=nvfp4", "NVFP4 weights are served requantized to MXFP4; set RADIANCE_NVFP4_MXFP4=1"),
        ("speculation@variant.speculation=dflash7", "has no drafter; set variant.speculation.drafter"),
        ("+box.env.RADIANCE_PQ_I8='1'", "RADIANCE_PQ_I8 is a knob"),
        ("+box.env_secret=[RADIANCE_PQ_I8]", "is recorded elsewhere in plain"),
        ("box.container=null engine=docker", "has no image"),
        ("engine=docker engine.python=/usr/bin/python3", "set that"),
        ("box.evidence.required=[{pattern:'(',says:x}]", "no regular expression"),
    ],
)
def test_what_a_variant_may_not_declare_is_refused(plan_of, override, said):
    with pytest.raises(UsageError, match=said):
        plan_of("+variant=int5", "box=cpu", *override.split())


def test_what_a_box_may_declare_reaches_the_environment(plan_of):
    more = ("+box.env.VLLM_ANY='1'", "+box.env.TOKENIZERS_PARALLELISM=false1", "+box.env.MAX_TOKENS='5'")
    env = plan_of("+variant=int5", "box=cpu", *more).env
    assert (env["VLLM_ANY"], env["TOKENIZERS_PARALLELISM"], env["MAX_TOKENS"]) == ("1", "false1", "5")


def test_a_flag_with_underscores_is_the_flag_with_dashes(plan_of):
    argv = [
        plan_of("+variant=int5", "box=cpu", f"+variant.serve.{name}=4").argv
        for name in ("max-num-seqs", "max_num_seqs")
    ]
    assert argv[0] == argv[1] and argv[0].count("--max-num-seqs") == 1


def test_the_value_of_a_refused_secret_is_not_repeated(plan_of):
    with pytest.raises(UsageError) as caught:
        plan_of("+variant=int5", "box=cpu", "+box.env.HF_TOKEN=hf_very_secret")
    assert "hf_very_secret" not in str(caught.value)


def test_speculation_reaches_the_command_line(plan_of):
    argv = plan_of("+variant=bf16", "box=cpu", "variant.speculation.method=ngram", "variant.speculation.tokens=5").argv
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config == {"method": "ngram", "num_speculative_tokens": 5}


def test_a_variants_json_flag_changes_only_the_keys_it_names(plan_of):
    override = "+variant.serve.compilation-config={compile_sizes:[1,2]}"
    argv = plan_of("+variant=int4", *R9700X2, override).argv
    config = json.loads(argv[argv.index("--compilation-config") + 1])
    assert config["compile_sizes"] == [1, 2] and config["pass_config"]["fuse_norm_quant"] is True


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_sees_fixed_places_and_its_mounts_say_what_is_there(plan_of, engine):
    made = plan_of("+variant=int4", *R9700X2, f"engine={engine}", "box.models_dir=/models")
    mounts = {mount.target: (mount.source, mount.read_only) for mount in made.container.mounts}
    assert mounts["/paro/model"] == ("/models/Qwen3.8-27B-PARO", True)
    assert mounts["/paro/drafter"] == ("/models/Qwen3.8-27B-DFlash2-FP8", True)
    assert mounts["/paro/cache"] == (made.cache_dir, False) and mounts["/paro/plugin"][1]
    seen = json.dumps([made.argv, dict(made.env)])
    assert not [source for source, _ in mounts.values() if source in seen]
    assert plan.with_nonce(made, "n", Path("/state/attest"))[1]["RADIANCE_ATTEST_DIR"] == "/paro/attest"


def test_a_container_on_a_network_of_its_own_listens_on_every_address(plan_of):
    made = plan_of("+variant=int4", "box=cpu", "engine=docker")
    assert made.argv[made.argv.index("--host") + 1] == "0.0.0.0" and made.host == "127.0.0.1"


def test_a_box_without_a_process_engine_takes_its_own(plan_of):
    assert plan_of("+variant=int4", "box=r9700x2").engine == "docker"
    assert plan_of("+variant=int4", "box=cpu").engine == "process"


def test_another_drafter_gets_another_cache_directory(plan_of, tmp_path):
    models = f"box.models_dir={tmp_path}"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"name": "{name}"}}')
    dirs = {
        plan_of("+variant=int4", *R9700X2, models, f"variant.speculation.drafter={name}").cache_dir
        for name in ("one", "two")
    }
    assert len(dirs) == 2


def test_a_secret_reaches_the_boot_and_neither_plan_nor_json(plan_of, tmp_path):
    made = plan_of("+variant=int4", "box=cpu", "+box.env_secret=[HF_TOKEN]")
    secrets = plan.secrets_of(made, {"HF_TOKEN": "hf_very_secret", "OTHER": "x"})
    assert plan.with_nonce(made, "n", tmp_path, secrets)[1]["HF_TOKEN"] == "hf_very_secret"
    assert "HF_TOKEN" not in made.env and made.secrets == ("HF_TOKEN",) and "hf_very_secret" not in plan.as_json(made)
    with pytest.raises(UsageError, match="HF_TOKEN is not set here; export HF_TOKEN"):
        plan.secrets_of(made, {"HF_TOKEN": ""})


def test_the_markers_of_a_plan_are_those_of_its_weights_and_knobs(plan_of):
    def required(*overrides: str) -> str:
        return " ".join(m.pattern for m in plan_of(*overrides, *R9700X2).evidence.required)

    assert "304/304" in required("+variant=nvfp4_mxfp4") and "304/304" not in required("+variant=mxfp4_paro")
    assert "256/256" in required("+variant=nvfp4_mxfp4", "+variant.knobs.RADIANCE_NVFP4_BF16_LAYERS=none")
    assert "rot stream" not in required("+variant=int4", "+variant.knobs.RADIANCE_PQ_ROT_STREAM=0")
    assert plan_of("+variant=bf16", "box=cpu").evidence.required == ()


def test_a_containers_port_is_published_on_an_address_not_on_a_name(plan_of):
    with pytest.raises(UsageError, match=r"box.host: .*'localhost' is a name; write the IPv4 address"):
        plan_of("+variant=int5", "box=cpu", "engine=docker", "box.host=localhost")
    assert plan_of("+variant=int5", "box=cpu", "box.host=localhost").host == "localhost"


def test_plugins_of_the_image_are_named_beside_ours(plan_of):
    """As docker/gfx1201.md says to."""
    named = plan_of("+variant=int5", "box=r9700x2", '+box.env.VLLM_PLUGINS="paroquant_gfx1201,theirs"')
    assert named.env["VLLM_PLUGINS"] == "paroquant_gfx1201,theirs"
    with pytest.raises(UsageError, match="VLLM_PLUGINS=theirs does not load paroquant_gfx1201"):
        plan_of("+variant=int5", "box=r9700x2", "+box.env.VLLM_PLUGINS=theirs")


def test_the_decode_bands_rule_is_not_passed_by_leaving_its_number_out(plan_of):
    with pytest.raises(UsageError, match=r"box\.serve\.max-num-seqs: it is not set"):
        plan_of("+variant=int5", "box=cpu", "~box.serve.max-num-seqs")
    assert plan_of("+variant=bf16", "box=cpu", "~box.serve.max-num-seqs").quantized is False
