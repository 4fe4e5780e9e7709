"""What one or several runs came to: one HTML page with plots, and a summary in the terminal.

    python tools/report.py RUN_DIR
    python tools/report.py RUN_DIR OTHER_RUN_DIR --output comparison.html

See docs/report.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Works in a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ft.report.command import main

if __name__ == "__main__":
    sys.exit(main())
