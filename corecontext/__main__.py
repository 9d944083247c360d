"""Run the command line: `python -m corecontext`."""

import sys

from corecontext.cli import main

sys.exit(main())
