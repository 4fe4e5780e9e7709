"""Injected faults: what they are called, when they are due, and how a process carries them out.

`spec` is the grammar, `rates` draws faults from probabilities, `plan` collects what the flags and
the YAML file ask for, `injector` is told of every point that a process reaches and strikes there.
Production code knows nothing of this: wrappers from outside report the points.
"""
