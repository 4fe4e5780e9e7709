"""MeCeFO: a neighbour runs two stages, in layers that cost about two thirds (arXiv 2510.16415).

``options`` and ``budget`` say what is degraded, ``layer`` and ``linear`` are the degraded layer,
``basis`` and ``refresh`` the singular vectors of its low-rank weight gradients, ``gradient_rule``
and ``hold`` what the other replicas do with gradients that are missing, and ``degraded`` switches
the layers of a stage.
"""
