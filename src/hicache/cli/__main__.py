"""``python -m hicache.cli``: the same as the command ``hicache``."""

import sys

from hicache.cli import main

sys.exit(main())
