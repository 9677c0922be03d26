"""What a person gets who does not know a verb, an option, a key or a knob by heart."""

from __future__ import annotations

import shlex
import shutil

import pytest

from orchestrator import cli, config, help_text, knobs, shipped
from orchestrator.errors import UsageError
from orchestrator.verbs import OWNERS, VERBS

INTERNAL = {"schedule unit"}  # what the scheduler starts


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - INTERNAL))
def test_every_verb_says_what_it_does_with_an_example_that_parses(verb, capsys):
    assert cli.main([*verb.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"python -m orchestrator {verb}: ") and "\nexample\n  python -m orchestrator " in said
    words = shlex.split(said.rpartition("python -m orchestrator ")[2])
    parsed = cli.parse(words)
    assert parsed.verb == verb or help_text.ALIKE.get(verb) == parsed.verb
    for word in parsed.overrides:
        assert "=" not in word or word.partition("=")[0].lstrip("+").partition(".")[0] in said


@pytest.mark.parametrize("option", sorted(OWNERS))
def test_every_option_is_told_where_it_belongs_and_nowhere_else(option):
    written = help_text.OPTIONS[option][0].split()[0]
    for verb in VERBS.keys() - INTERNAL:
        assert (f"\n  {written} " in help_text.of(verb, OWNERS)) == (verb in OWNERS[option])


def test_examples_of_runs_and_abs_are_ones_that_can_be_declared():
    for verb, load in (("plan", config.load), ("run", config.load), ("ab", config.load_ab)):
        load([*cli.parse(shlex.split(help_text.VERBS[verb].example)).overrides, "box=cpu"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plna"], "did you mean plan?"),
        (["verdct", "abcd"], "did you mean verdict?"),
        (["plna", "--help"], "did you mean plan?"),
        (["schedule", "ad"], "did you mean schedule add?"),
        (["plan", "--jsn"], "did you mean --json? see `plan --help`"),
        (["ab", "--resum", "abcd"], "did you mean --resume?"),
        (["knobs", "zebra"], "no knob has zebra"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_knobs_are_searched_by_name_and_text(capsys):
    assert cli.main(["knobs", "rotation", "silu"]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[0] for line in lines] == ["RADIANCE_PQ_ROT_STREAM2"]
    assert [knob.name for knob in knobs.matching(["zpe"])] == ["RADIANCE_PQ_ZPE"]
    assert len(knobs.matching([])) == len(knobs.REGISTRY)


@pytest.fixture
def own_conf(tmp_path, monkeypatch):
    """A copy of the shipped configuration to make mistakes in: (file, text, wrong text)."""
    shutil.copytree(shipped.conf_dir(), tmp_path / "conf")
    shutil.copytree(shipped.experiments_dir(), tmp_path / "experiments")
    monkeypatch.setattr(shipped, "conf_dir", lambda: tmp_path / "conf")

    def spoil(file: str, was: str, now: str) -> None:
        path = tmp_path / file
        text = path.read_text()
        assert was in text
        path.write_text(text.replace(was, now, 1))

    return spoil


@pytest.mark.parametrize(
    ("file", "was", "now", "said"),
    [
        (
            "conf/box/cpu.yaml",
            "port: 8100",
            "port: many",
            "'many' is no whole number; write one, as in 8 (in {}: port)",
        ),
        ("conf/box/cpu.yaml", "port: 8100", "port: 0", "in {}: port: 0 is out of range"),
        ("conf/weights/int5.yaml", "bits: 5", "bits: x", "(in {}: bits)"),
        ("conf/weights/int5.yaml", "bits: 5", "bitz: 5", "there is no such key (in {}: bitz)"),
        ("conf/suite/quick.yaml", "seed: ", "seed: -", "in {}: seed: "),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_its_key(own_conf, file, was, now, said):
    own_conf(file, was, now)
    with pytest.raises(UsageError) as caught:
        config.load(["+variant=int5", "box=cpu"])
    assert said.format(file) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "was", "now", "said"),
    [
        ("conf/gate/kernel.yaml", "alpha: 0.05", "alpha: 2", "in {}: alpha: 2.0 is no one-sided level"),
        ("conf/gate/kernel.yaml", "looks: [2, 4, 6]", "looks: [x]", "(in {}: looks[0])"),
        (
            "experiments/zpe.yaml",
            "min_effect: 0.02",
            "min_effect: 3",
            "in {}: gate.criteria.prefill.min_effect: 3.0 is",
        ),
    ],
)
def test_a_mistake_in_a_gate_names_the_file_and_its_key(own_conf, file, was, now, said):
    own_conf(file, was, now)
    with pytest.raises(UsageError) as caught:
        config.load_ab(["+experiment=zpe", "box=cpu"])
    assert said.format(file) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("box.port=many", "@ box.port"),
        ("variant.speculation.tokens=x", "@ variant.speculation.tokens"),
        ("+box.foo=1", "there is no such key @ box.foo"),
    ],
)
def test_a_mistake_on_the_command_line_names_the_key_and_no_file(override, said):
    with pytest.raises(UsageError) as caught:
        config.load(["+variant=int5", "box=cpu", override])
    assert str(caught.value).endswith(said) and "conf/" not in str(caught.value)


def test_a_verb_names_the_verbs_below_it():
    said = help_text.of("schedule", {})
    assert "  schedule add " in said and "  schedule remove " in said and "  schedule summary " in said
    assert "verbs, with" not in help_text.of("compare", {})
