"""`python -m agent_rl` is `agent-rl`."""

import sys

from agent_rl.cli import main

sys.exit(main())
