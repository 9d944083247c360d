"""`python -m corecontext`: the command line."""

import sys

from corecontext.cli import main

sys.exit(main())
