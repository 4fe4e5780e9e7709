"""Run jobs with faults for real, and compare each with its fault-free run.

    python tools/campaign.py examples/campaigns/sample.yaml
    python tools/campaign.py examples/campaigns/*.yaml --out runs/campaign

Goes on where it was stopped. See docs/campaigns.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Works in a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ft.campaign.command import main

if __name__ == "__main__":
    sys.exit(main())
