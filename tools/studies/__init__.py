"""The convergence studies of ``tools/convergence.py``.

failures       which stage is lost when, drawn beforehand               pure
cells          one job of a study: its flags, and its name on disk      pure
results        what a job left, and how it is read                      pure but for files
statistics     means, orders, times to a target                         pure
timing         what an iteration costs, in units of a normal one        pure
runner         runs cells one at a time, keeps those that are done
tables, plots  Markdown, JSON and PNG
ablation, swap_share, mecefo, strategies, iteration_time                one study each
"""
