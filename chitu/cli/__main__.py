"""`python -m chitu.cli` is the `chitu` command."""

import sys

from chitu.cli import main

sys.exit(main())
