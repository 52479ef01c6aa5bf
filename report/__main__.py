"""``python -m nvme_ops.report`` is ``nvme-report``."""

import sys

from .cli import main

sys.exit(main())
