"""The shipped configuration: where its files are, and the names in each group."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import UsageError


def conf_dir() -> Path:
    """The directory of the shipped configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    for path in (package / "conf", package.parent / "conf"):
        if (path / "config.yaml").is_file():
            return path
    raise UsageError(f"{package.parent / 'conf'}: the shipped configuration is missing; install the package again")


def experiments_dir() -> Path:
    """The directory of the declared A/Bs, and of the ledger."""
    return conf_dir().parent / "experiments"


def names(group: str) -> list[str]:
    """What a group of conf/ has to choose from; "experiments" has a directory of its own."""
    directory = experiments_dir() if group == "experiments" else conf_dir() / group
    return sorted(path.stem for path in directory.glob("*.yaml"))
