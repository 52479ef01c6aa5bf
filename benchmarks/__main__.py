"""``python benchmarks NAME``: measures this package beside others; without a name it lists the benchmarks."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # so that it runs from anywhere, uninstalled too

from benchmarks import command

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:]))
