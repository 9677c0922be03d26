"""The failures a person at the terminal can act on; everything else is a defect and keeps its traceback."""

from __future__ import annotations

from pathlib import Path


class OrchestratorError(Exception):
    """One line that says what is wrong, where, and what to do; `detail` follows on its own lines."""

    exit_code = 1

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class UsageError(OrchestratorError):
    """Wrong configuration, command line or machine: nothing was started or changed."""

    exit_code = 2


class BootError(OrchestratorError):
    """The server did not come up as planned, or did not go down. `log_path` is its log, where there is one."""

    exit_code = 1

    def __init__(self, message: str, detail: str = "", log_path: Path | None = None) -> None:
        super().__init__(message, detail)
        self.log_path = log_path


class InvalidMeasurement(OrchestratorError):
    """Something was measured that may not be used."""

    exit_code = 3
