"""What a rank of a campaign runs where something is looked at in it: pretrain_llama_ft.py, hooked.

Started by tools/campaign.py, which says in the environment what to look at.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Works in a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ft.campaign import hooks
from megatron_ft.runtime import main

if __name__ == "__main__":
    names = os.environ[hooks.NAMES].split(",")
    hooks.run_after_start(names, hooks.LOOKS | hooks.SABOTAGE)
    sys.exit(main())
