"""One page on what a run came to, for a browser, and the same in a few lines for a terminal.

Everything is computed from the run directory (docs/run_directory.md), most of it by
`megatron_ft.observe`, so that page, terminal and `summary.json` show the same numbers. Nothing here
imports torch or MPI. `tools/report.py` is the command, docs/report.md says what the page shows.
"""
