"""What a run tells about itself: events, summary, progress lines, Weights & Biases.

Nothing here imports torch or MPI. The runtime emits events; every other view (summary, progress
line, wandb, incident table) is computed from them, so that all views show the same numbers.
"""
