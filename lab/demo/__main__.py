"""`python -m lab.demo`, in the repository's root: what `make demo` runs."""

from __future__ import annotations

import sys

from lab.demo.program import main

if __name__ == "__main__":
    sys.exit(main())
