"""`python -m asynctp_passes`: the command `asynctp`."""

import sys

from asynctp_passes.tools.cli import main

sys.exit(main())
