"""How long tests may take."""

import os

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
"""Whether tests look for minutes each, where a change is tested in seconds else."""
