"""`python -m hybridtei`."""

import sys

from hybridtei.cli import main

sys.exit(main())
