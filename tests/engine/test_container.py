"""A boot in a container of a real daemon: what is accepted, what is proven, and that nothing is left."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import compile_cache
from orchestrator.boot import check_port, serving
from orchestrator.engines.container import containers_of
from orchestrator.engines.process import processes_of
from orchestrator.errors import UsageError

pytestmark = pytest.mark.engine


def boot_once(plan, box, state: Path):
    with serving(plan, box.engine, "measured", state) as running:
        (container,) = containers_of(box.client, running.boot.nonce)
        inspected = box.client.api.inspect_container(container.id)
    assert containers_of(box.client, running.boot.nonce) == [] and processes_of(running.boot.nonce) == []
    check_port(plan.host, plan.port)
    return running.boot, inspected


def test_a_server_as_planned_gives_a_usable_warm_boot(stub_plan, box, tmp_path):
    plan = stub_plan(box)
    compile_cache.mark(Path(plan.cache_dir), "warm", plan.plugin.sha256)
    boot, _ = boot_once(plan, box, tmp_path)
    assert (boot.status, boot.reasons, boot.cache_state) == ("ok", (), "warm")
    assert boot.kv_tokens == 46592 and boot.compiled_files == 0 and boot.boot_s > 0 and boot.rss_peak_bytes > 10**6
    assert boot.processes and all(dict(reading.env) == dict(plan.env) for reading in boot.processes)
    assert dict(boot.inspected) == dict(plan.env)
    assert [attested["nonce"] for attested in boot.attestations] == [boot.nonce]
    assert "KV cache size" in Path(boot.log_path).read_text()


def test_the_container_has_what_the_plan_says_and_no_more(stub_plan, box, tmp_path):
    plan = stub_plan(box, memory_gib=0.5)
    boot, inspected = boot_once(plan, box, tmp_path)
    host = inspected["HostConfig"]
    assert inspected["Name"].lstrip("/") == f"paro-{boot.nonce}"
    labels = {k: v for k, v in inspected["Config"]["Labels"].items() if k.startswith("paro-orchestrator.")}
    assert labels == {
        "paro-orchestrator.nonce": boot.nonce,
        "paro-orchestrator.box": "cpu",
        "paro-orchestrator.purpose": "measured",
        "paro-orchestrator.owner": str(os.getpid()),
    }
    assert host["Privileged"] is False and host["Memory"] == 2**29 and host["ShmSize"] == 512 * 2**20
    assert host["PortBindings"] == {f"{plan.port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(plan.port)}]}
    writable = {mount["Destination"] for mount in inspected["Mounts"] if mount["RW"]}
    assert writable == {"/paro/cache", "/paro/attest"}
    assert {"/paro/model", "/paro/plugin"} <= {mount["Destination"] for mount in inspected["Mounts"]}


def test_the_port_is_published_on_the_boxs_host(stub_plan, box, tmp_path):
    plan = replace(stub_plan(box), host="127.0.0.2")
    boot, inspected = boot_once(plan, box, tmp_path)
    assert boot.status == "ok"
    (binding,) = inspected["HostConfig"]["PortBindings"][f"{plan.port}/tcp"]
    assert binding["HostIp"] == "127.0.0.2"


def test_what_a_server_writes_in_its_cache_belongs_to_the_user(stub_plan, box, tmp_path):
    plan = stub_plan(box, "compiles")
    boot_once(plan, box, tmp_path)
    assert (Path(plan.cache_dir) / "inductor" / "ab" / "graph.so").stat().st_uid == os.getuid()


def test_the_images_own_entrypoint_never_runs(stub_plan, box, tmp_path):
    """The stub's image has one that drops a knob and ends."""
    boot, inspected = boot_once(stub_plan(box), box, tmp_path)
    assert inspected["Path"].endswith("python3") and boot.status == "ok"


@pytest.mark.parametrize(
    ("launcher", "value"), [("drops-a-knob", "'none'"), ("changes-a-knob", "'7'")], ids=["dropped", "changed"]
)
def test_a_knob_that_an_entrypoint_script_tampers_with_is_named_with_all_four_values(
    stub_plan, box, tmp_path, launcher, value
):
    boot, _ = boot_once(stub_plan(box, python=f"/usr/local/bin/{launcher}"), box, tmp_path)
    (reason,) = boot.reasons
    assert boot.status == "invalid"
    assert reason.startswith("RADIANCE_PQ_ZPE: the plan says '1', the container's inspect says '1', process ")
    assert f" has {value}" in reason
    assert reason.endswith(f"attests {value}")


def test_a_warm_boot_that_compiles_is_invalid(stub_plan, box, tmp_path):
    plan = stub_plan(box, "compiles")
    compile_cache.mark(Path(plan.cache_dir), "warm", plan.plugin.sha256)
    boot, _ = boot_once(plan, box, tmp_path)
    assert boot.status == "invalid" and "a warm boot compiled 1 files" in boot.reasons[0]


def test_a_server_that_ignores_sigterm_is_gone_after_its_grace(stub_plan, box, tmp_path):
    boot, _ = boot_once(stub_plan(box, "ignores-sigterm"), box, tmp_path)
    assert boot.status == "ok"


def test_a_missing_mount_source_is_refused_before_podman_makes_it(stub_plan, box, tmp_path):
    plan = stub_plan(box)
    model = Path(plan.checkpoint.path)
    model.rmdir()
    with (
        pytest.raises(UsageError, match="to be mounted at /paro/model, does not exist"),
        serving(plan, box.engine, "measured", tmp_path),
    ):
        pass
    assert not model.exists()
