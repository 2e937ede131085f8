"""`python -m anywidth_runtime`."""

import sys

from anywidth_runtime.server.options import main

sys.exit(main())
