"""What YAML 1.1 reads as another number than the one that was typed: 0100 is 64, 1:40 is 100, 0x10 is 16."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from orchestrator.errors import UsageError

_CHOICE = re.compile(r"\+?(?P<group>variant|box|engine|suite|gate|experiments)(?:@[ab])?=(?P<name>[\w-]+)")
_PLAIN = re.compile(r"[-+]?(0|[1-9]\d*)")
_INTEGER = "tag:yaml.org,2002:int"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def require(roots: Sequence[Path], overrides: Sequence[str]) -> None:
    """Raises UsageError, naming file and line, for such a number in a file that the overrides choose.

    `roots` are directories with one directory for each group. A file that is missing or no YAML is Hydra's to refuse.
    """
    for choice in filter(None, map(_CHOICE.fullmatch, overrides)):
        for root in roots:
            path = root / choice["group"] / f"{choice['name']}.yaml"
            try:
                tree = yaml.compose(path.read_text("utf-8"), Loader=_Loader)
            except (OSError, ValueError, yaml.YAMLError):
                continue
            for node in _integers(tree):
                if not _PLAIN.fullmatch(node.value):
                    raise UsageError(
                        f"{path}, line {node.start_mark.line + 1}: YAML reads {node.value} as another number than it "
                        "looks like; write it in plain decimal digits, or in quotes"
                    )


def _integers(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        if node.tag == _INTEGER and not node.style:
            yield node
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for part in pair:
                yield from _integers(part)
    elif isinstance(node, yaml.SequenceNode):
        for part in node.value:
            yield from _integers(part)
