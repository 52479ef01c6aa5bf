"""``python -m nvme_ops.bench`` is ``nvme-bench``."""

import sys

from nvme_ops.measure.bench import main

if __name__ == "__main__":
    sys.exit(main())
