"""`python -m onekv` is `onekv`."""

import sys

from .cli import main

sys.exit(main())
