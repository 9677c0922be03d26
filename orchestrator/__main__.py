"""`python -m orchestrator [VERB] [Hydra overrides]`."""

import sys

from orchestrator.cli import entry

sys.exit(entry())
