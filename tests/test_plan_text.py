"""Plans for people: a line that can be pasted, and what two variants differ in."""

from __future__ import annotations

import json
import shlex

from orchestrator import plan_text

R9700X2 = ("box=r9700x2", "speculation@variant.speculation=dflash7", "box.models_dir=/models")


def words(text: str) -> list[str]:
    """The words that a shell makes of the command line."""
    return shlex.split(text.split("\n\n", 1)[1].replace("\\\n", " "))


def test_the_process_line_has_the_whole_environment_and_the_argv(plan_of):
    made = plan_of("+variant=int5", "box=cpu")
    line = words(plan_text.as_text(made))
    assert line[:2] == ["env", "-i"] and line[-len(made.argv) :] == list(made.argv)
    assert {f"{name}={value}" for name, value in made.env.items()} <= set(line)


def test_the_docker_line_asks_for_what_the_plan_has_and_is_never_privileged(plan_of):
    made = plan_of("+variant=int4", *R9700X2, "engine=docker")
    line = words(plan_text.as_text(made))
    assert line[:6] == ["mkdir", "-p", f"{made.cache_dir}/home", "&&", "docker", "run"]
    assert (
        "--privileged" not in line and "type=bind,source=/models/Qwen3.8-27B-PARO,target=/paro/model,readonly" in line
    )
    asked = [line[n + 1] for n, word in enumerate(line) if word in ("--device", "--cap-add", "--security-opt", "--ipc")]
    assert asked == ["/dev/kfd", "/dev/dri", "host", "SYS_PTRACE", "seccomp=unconfined"]
    at = line.index("--entrypoint")
    assert [line[at + 1], *line[at + 3 :]] == list(made.argv)


def test_the_podman_line_keeps_the_users_groups(plan_of):
    line = words(plan_text.as_text(plan_of("+variant=int4", *R9700X2, "engine=podman")))
    assert line[line.index("--group-add") + 1] == "keep-groups" and "--user" not in line


def test_a_port_is_published_on_the_boxs_host_only(plan_of):
    line = words(plan_text.as_text(plan_of("+variant=int4", "box=cpu", "engine=docker")))
    assert line[line.index("--publish") + 1] == "127.0.0.1:8100:8100"


def test_a_secret_is_masked_and_taken_from_the_shell(plan_of):
    for engine in ("process", "docker"):
        made = plan_of("+variant=int4", "box=cpu", f"engine={engine}", "+box.env_secret=[HF_TOKEN]")
        text = plan_text.as_text(made)
        assert "HF_TOKEN=***" in text
        assert ("HF_TOKEN=$HF_TOKEN" if engine == "process" else "HF_TOKEN") in words(text)


def test_two_variants_differ_in_knobs_flags_mounts_checkpoint_and_fingerprints(plan_of):
    a = plan_of("+variant=int4", *R9700X2)
    b = plan_of("+variant=int5_i8_pg_zpe", *R9700X2, "variant.speculation.tokens=5")
    found = plan_text.differences(a, b)
    assert found["env RADIANCE_PQ_I8"] == ("0", "1")
    assert found["checkpoint path"][1] == "/models/Qwen3.8-27B-PARO-int5"
    assert found["container mounts /paro/model"][0] == "/models/Qwen3.8-27B-PARO (read-only)"
    assert '"num_speculative_tokens": 5' in found["argv --speculative-config"][1]
    assert {"fingerprint", "cache_dir"} <= found.keys() and "argv --kv-cache-dtype" not in found


def test_what_follows_from_each_plans_own_compile_cache_is_named_and_not_shown(plan_of):
    a, b = plan_of("+variant=int5_i8_pg", "box=cpu"), plan_of("+variant=int5_i8_pg_zpe", "box=cpu")
    text = plan_text.differences_as_text(a, b, ("one", "two"))
    assert "one and two differ in 3 fields" in text and "\nenv RADIANCE_PQ_ZPE\n  one  0\n  two  1\n" in text
    assert a.cache_dir not in text and b.cache_dir not in text
    last = text.splitlines()[-1]
    assert "cache_dir" in last and "env TRITON_CACHE_DIR" in last and "PQ_ZPE" not in last
    assert not plan_text.follows(["/c1/x", None], ["/c1", "/c2"]) and not plan_text.follows(
        ["/c1", "/c1"], ["/c1", "/c2"]
    )


def test_a_field_that_one_plan_lacks_is_shown_as_missing(plan_of):
    a, b = plan_of("+variant=int4", "box=r9700x2"), plan_of("+variant=int4", *R9700X2)
    assert plan_text.differences(a, b)["argv --speculative-config"][0] is None
    assert "\n  one  -\n" in plan_text.differences_as_text(a, b, ("one", "two"))
    assert json.loads(plan_text.differences_as_json(a, b, ("one", "two")))["plans"] == ["one", "two"]


def test_equal_plans_are_said_to_be_the_same_server(plan_of):
    a, b = plan_of("+variant=int4", "box=cpu"), plan_of("+variant=int4", "box=cpu")
    assert plan_text.differences_as_text(a, b, ("a", "b")) == "a and b are the same server"


def test_a_path_with_a_comma_and_a_limit_of_memory_are_as_the_engine_gets_them(plan_of):
    overrides = (
        "box=r9700x2",
        "engine=docker",
        "+variant=int5",
        "box.models_dir='/a,b c'",
        "+box.container.memory_gib=0.5",
    )
    said = plan_text.as_text(plan_of(*overrides))
    assert """--mount 'type=bind,"source=/a,b c/Qwen3.8-27B-PARO-int5",target=/paro/model',readonly""" in said
    assert "--memory 0.5g --memory-swap 0.5g" in said
