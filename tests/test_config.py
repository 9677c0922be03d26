"""The configuration: what is declared is taken as it was written, or refused in one line that names its key."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import compile_cache, config, detection, journal, owner, shipped
from orchestrator.errors import UsageError
from orchestrator.recorded import identity, mlflow_store
from orchestrator.records import from_jsonable
from orchestrator.schema import Detect, Engine


def refused(*overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        config.load(["+variant=int5", "box=cpu", *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("box.port=true", "True is no whole number; write one, as in 8 @ box.port"),
        ("box.port=8391.7", "8391.7 is no whole number"),
        ("box.port='8391'", "'8391' is no whole number"),
        ("box.port=0", "box.port: 0 is out of range; write a number from 1 to 65535"),
        ("box.prod_port=65536", "box.prod_port: 65536 is out of range"),
        ("variant.weights.bits=010", "a leading zero means octal"),
        ("variant.weights.bits=4.9", "4.9 is no whole number"),
        ("variant.weights.bits=8", "variant.weights.bits: int5-bitplane has 5 bits, not 8"),
        ("paths.cache=true", "True is no text; put it in quotes, as in '1' @ paths.cache"),
        ("paths.cache=", "paths.cache: it is empty"),
        ("paths.tracking=''", "paths.tracking: it is empty"),
        ("box.disk_free_gib=nan", "nan is no finite number"),
        ("box.disk_free_gib=-1", "box.disk_free_gib: -1.0 is out of range; write a number of at least 0"),
        ("box.drain_timeout_s=inf", "inf is no finite number"),
        ("box.drain_timeout_s=true", "True is no finite number"),
        ("engine.ready_timeout_s=-1", "engine.ready_timeout_s: -1.0 is out of range; write a number above 0"),
        ("engine.ready_timeout_s=0", "engine.ready_timeout_s: 0.0 is out of range"),
        ("box.formats=bf16", "'bf16' is no list; write one, as in [a,b] @ box.formats"),
        ("box.detect.always=1", "1 is neither true nor false"),
        ("box.host=", "box.host: it is empty"),
        ("box.container.image=", "box.container.image: it is empty"),
        ("box.host='http://here'", "box.host: 'http://here' is no host"),
        ("+box.env.ONE=off1e3", ""),  # a text, as it stands
        ("+box.env.ONE=true", "True is no text; put it in quotes, as in '1' @ box.env['ONE']"),
        ("+box.env.ONE=1e3", "1000.0 is no text"),
        ("+box.env.ONE=null", "None is no text"),
        ("box.model=3", "expected Model @ box.model"),
        ("suite.benches=3", "expected a mapping @ suite.benches"),
        ("+=x", "'+=x' is no override; write KEY=VALUE"),
        ("=", "'=' is no override"),
        ("variant.speculation.tokens=5,6", "add -m for one run with each value"),
        ("paths.cache=/tmp/ä", "put the value in quotes of its own"),
        ("paths.cache=/tmp/\udcc3", "set LC_ALL=C.UTF-8"),
        ("+variant=int4", "more than one variant; keep one, or -m +variant=A,B"),
    ],
)
def test_a_value_is_never_taken_for_another(override, said):
    if said:
        assert said in refused(override)
    else:
        assert config.load(["+variant=int5", "box=cpu", override]).box.env["ONE"] == "off1e3"


@pytest.mark.parametrize("spelt", ["+variant=int5", "++variant=int5", "variant=int5"])
def test_a_variant_is_named_with_any_number_of_pluses(spelt):
    assert config.load([spelt, "++box=cpu"]).variant.name == "int5"
    assert not config.box_was_detected([spelt, "++box=cpu"])


def test_a_list_of_variants_without_m_says_what_is_missing():
    with pytest.raises(UsageError, match=r"\+variant=int4,int5: a list is one run .* add -m"):
        config.load(["+variant=int4,int5", "box=cpu"])


def test_an_arm_with_an_open_quote_is_one_line():
    with pytest.raises(UsageError, match="close the quotes"):
        config.load_arm("int4 'x", [])


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Detect, []),
        (Detect, None),
        (Detect, {"priority": True}),
        (Detect, {"priority": 1, "pci": 10027551}),
        (Engine, {"kind": "process", "python": None, "ready_timeout_s": float("nan"), "stop_grace_s": 1}),
    ],
)
def test_a_record_of_other_types_is_a_value_error_of_one_line(kind, data):
    with pytest.raises(ValueError) as caught:
        from_jsonable(kind, data)
    assert kind.__name__ in str(caught.value) and "\n" not in str(caught.value)


def test_a_whole_number_is_a_number():
    engine = from_jsonable(Engine, {"kind": "process", "python": None, "ready_timeout_s": 5, "stop_grace_s": 1})
    assert (engine.ready_timeout_s, type(engine.ready_timeout_s)) == (5.0, float)


@pytest.fixture
def conf(tmp_path, monkeypatch) -> Path:
    """A copy of the shipped configuration that may be damaged."""
    copy = shutil.copytree(shipped.conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(shipped, "conf_dir", lambda: copy)
    return copy


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: zz\n", "detect is missing; add it"),
        (b"", "it is empty or no mapping"),
        (b"- a\n", "it is empty or no mapping"),
        (b"a: [b\n", "no YAML"),
        (b"\xff\xfe\x00", "no YAML"),
        (b'detect: {priority: 1, pci: "10027551"}\n', "detect.pci is '10027551'; write \"vendor:device\""),
        (b"detect: {priority: 1, pci: 10027551}\n", "10027551 is no text"),
        (b"detect: 3\n", "expected a mapping @ Detect"),
    ],
)
def test_a_damaged_box_is_named(conf, content, said):
    (conf / "box" / "zz.yaml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        detection.detect_box()
    assert f"box/zz.yaml: {said}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("typed", ["0100", "1:40", "0x40", "6_4", "0b1000000"])
def test_a_number_that_yaml_reads_as_another_one_is_refused_with_its_line(conf, typed):
    text = (conf / "variant" / "int5_i8_pg.yaml").read_text()
    (conf / "variant" / "zz.yaml").write_text(
        text.replace("knobs: {}", f"knobs:\n  RADIANCE_PQ_DECODE_MAX_M: {typed}").replace("int5_i8_pg\n", "zz\n", 1)
    )
    with pytest.raises(UsageError, match=rf"variant/zz\.yaml, line \d+: YAML reads {typed} as another number"):
        config.load(["+variant=zz", "box=cpu"])


def test_plain_and_quoted_numbers_of_a_variant_are_taken(conf):
    text = (conf / "variant" / "int5.yaml").read_text()
    text = text.replace("knobs: {}", "knobs: {RADIANCE_PQ_DECODE_MAX_M: 100, RADIANCE_PQ_CHECKALL: '1'}")
    (conf / "variant" / "zz.yaml").write_text(text)
    knobs = config.load(["+variant=zz", "box=cpu"]).variant.knobs
    assert knobs == {"RADIANCE_PQ_DECODE_MAX_M": 100, "RADIANCE_PQ_CHECKALL": "1"}


def test_a_damaged_variant_is_named(conf):
    (conf / "variant" / "zz.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(UsageError, match=r"variant/zz\.yaml: it is no UTF-8 text"):
        config.load(["+variant=zz", "box=cpu"])


def test_a_package_without_its_configuration_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "orchestrator" / "shipped.py"))
    with pytest.raises(UsageError, match="the shipped configuration is missing; install"):
        shipped.conf_dir()


@pytest.mark.parametrize("content", ["[]", "null", '"warm"', "3", "{", '{"state": "warming"}'])
def test_a_compile_cache_with_a_damaged_state_is_cold(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    assert compile_cache.state(tmp_path) == "cold"


GONE = {"pid": 2**22 + 1, "start_time_s": 1.0, "host": owner.current().host}


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "null", "{", "3", '"x"', "{}"),
        json.dumps({"owner": [], "ended": False}),
        json.dumps({"owner": {**GONE, "pid": None}, "ended": False}),
        json.dumps({"owner": {**GONE, "pid": -1}, "ended": False}),
        json.dumps({"owner": GONE, "ended": "no"}),
        json.dumps({"owner": GONE, "ended": False, "engine": []}),
        json.dumps({"owner": GONE, "ended": False, "engine": {"kind": "process", "socket": 5}}),
    ],
)
def test_a_damaged_journal_is_said_once_and_moved_aside(tmp_path, content):
    path = journal.open_boot(tmp_path, "abc", "measured", "plan") / "journal.json"
    path.write_text(content)
    (line,) = journal.reap(tmp_path)
    assert (
        line == "boot abc has a damaged journal, moved to journal.json.damaged: ended 0 server processes or containers"
    )
    assert path.with_name("journal.json.damaged").read_text() == content
    assert json.loads(path.read_text())["ended"] is True  # so that its log can be pruned
    assert journal.reap(tmp_path) == []


def test_a_boot_whose_journal_was_damaged_meanwhile_is_closed(tmp_path):
    directory = journal.open_boot(tmp_path, "abc", "measured", "plan")
    (directory / "journal.json").write_text("[]")
    journal.close_boot(directory)
    assert json.loads((directory / "journal.json").read_text())["ended"] is True and journal.reap(tmp_path) == []


@pytest.mark.parametrize("content", ["[]", "null", '{"format": 1}', "{"])
def test_a_damaged_reference_is_one_line(tmp_path, content):
    from orchestrator import reference

    (tmp_path / "manifest.json").write_text(content)
    (tmp_path / "scores.npz").write_bytes(b"")
    with pytest.raises(UsageError, match=r"KL reference .*; delete the directory to remake it"):
        reference.read(tmp_path, "stack")


def test_a_reference_without_a_stack_is_damaged(tmp_path):
    import numpy

    from orchestrator import reference

    ids = numpy.zeros((3,), numpy.int32)
    document = reference.Document("c", ids, ids[None].repeat(2, 0), numpy.zeros((2, 3), numpy.float32))
    path = reference.save(tmp_path, "s", "k", reference.Reference((document,), 3, {}))
    manifest = json.loads((path / "manifest.json").read_text())
    assert reference.read(path, "s").top_k == 3
    del manifest["stack"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="is damaged"):
        reference.read(path, "s")


def test_a_package_inside_another_projects_checkout_has_no_commit(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e"]
    package = tmp_path / "venv" / "identity.py"
    package.parent.mkdir()
    package.write_text("")
    (tmp_path / "theirs").write_text("")
    for arguments in (["init", "-q"], ["add", "theirs"], ["commit", "-qm", "theirs"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(identity, "__file__", str(package))
    assert identity.git_commit() == "none"
    for arguments in (["add", "venv"], ["commit", "-qm", "ours"]):
        subprocess.run([*git, *arguments], check=True)
    assert len(identity.git_commit()) == 12


def test_a_full_disk_of_the_tracking_store_is_one_line(tmp_path):
    from sqlalchemy.exc import OperationalError

    cause = Exception("database or disk is full")
    failure = OperationalError("INSERT INTO params\nVALUES (?)\n" * 7, {"a": "b"}, cause)
    with pytest.raises(mlflow_store.TrackingError) as caught, mlflow_store.explained(tmp_path / "mlflow.db"):
        raise failure
    assert "the disk is full; free some space" in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.detail == ""


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_tracking_in_a_file_says_that_it_is_one(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(mlflow_store.TrackingError, match="is a file, or below one"):
        mlflow_store.probe(tmp_path / where)


def test_a_directory_in_place_of_the_tracking_database_says_that_it_is_one(tmp_path):
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(mlflow_store.TrackingError, match="is a directory, where the database goes"):
        mlflow_store.probe(tmp_path)


@pytest.mark.parametrize("written", ["bin/python", "python", "~/bin/python"])
def test_an_interpreter_is_found_from_here_not_from_the_servers_directory(tmp_path, monkeypatch, written):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    assert config.load_machine(["box=cpu", f"engine.python='{written}'"]).engine.python == f"{tmp_path}/bin/python"


def test_a_models_directory_is_found_from_here(tmp_path, monkeypatch):
    from orchestrator import checkpoint

    monkeypatch.chdir(tmp_path)
    box = config.load_machine(["box=r9700x2", "box.models_dir=models"]).box
    assert checkpoint.find_drafter(box.model, "x", box.models_dir).path == f"{tmp_path}/models/x"
