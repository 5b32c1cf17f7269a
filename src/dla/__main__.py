"""`python -m dla` is `dla`."""

import sys

from dla.cli import main

sys.exit(main())
