"""`python -m orchestrator [VERB] [Hydra overrides]`."""

import sys

from orchestrator.cli import main

sys.exit(main(sys.argv[1:]))
