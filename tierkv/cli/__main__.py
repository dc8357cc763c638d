"""``python -m tierkv.cli``."""

import sys

from tierkv.cli import main

sys.exit(main())
