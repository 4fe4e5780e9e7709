"""The convergence studies of ``tools/convergence.py``.

failures       which stage is lost when, drawn beforehand               pure
draws          the losses of runs that lose some stages only            pure
cells          one job of a study: its flags, and its name on disk      pure
grid           the cells of a study by what they vary, their results    pure
results        what a job left, and how it is read                      pure but for files
statistics     means, orders, times to a target                         pure
timing         what an iteration costs, in units of a normal one        pure
runner         runs cells one at a time, keeps those that are done
wording        what several studies say alike                           pure
report, plots  Markdown, JSON and PNG
ablation, swap_share, mecefo, strategies, iteration_time                one study each
"""
