"""`python -m benchmarks`: what `dev.py bench` calls."""

import sys

from benchmarks.cli import main

sys.exit(main(sys.argv[1:]))
