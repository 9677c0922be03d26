"""One box, one lease."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import lease
from orchestrator.errors import UsageError

HOLDER = (
    "import sys, time\nfrom pathlib import Path\nfrom orchestrator import lease\n"
    "with lease.hold('cpu', 'int5', Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
)


def test_a_second_orchestrator_is_refused_with_the_holders_name_until_the_first_dies(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "held\n"
            with (
                pytest.raises(UsageError, match=rf"box cpu is in use by process {first.pid} \(int5, since "),
                lease.hold("cpu", "int4", tmp_path),
            ):
                pass
            with lease.hold("another-box", "int4", tmp_path):
                pass
        finally:
            first.kill()  # SIGKILL: a failure must not wait for the holder to end by itself
    with lease.hold("cpu", "int4", tmp_path):
        pass


@pytest.mark.parametrize(
    ("expected_s", "said"), [(None, r"\)"), (7200, ", should end in 2 h 00 min"), (-600, ", 10 min 0. s over its time")]
)
def test_a_refusal_says_when_the_holder_should_be_done(tmp_path: Path, expected_s, said):
    with (
        lease.hold("cpu", "int5", tmp_path, expected_s),
        pytest.raises(UsageError, match=rf"\(int5, since [^,)]+({said})"),
        lease.hold("cpu", "int4", tmp_path),
    ):
        pass
