"""CheckFree and CheckFree+: a stage that every replica has lost is rebuilt from its neighbours
(arXiv 2506.15461).

What the runtime calls, in the order of a job's life:

``options``
    ``add_flags(parser) -> parser``; ``from_namespace(options) -> CheckfreeOptions`` (ValueError);
    ``validate(args) -> None`` with Megatron's parsed flags (FtArgumentError).
``twins``
    ``model_config_class(options) -> type``: what ``gpt_config_from_args(args, model_config_cls=)``
    takes; Megatron's own without CheckFree+.
``patches.checkfree.PATCHES``
    Installed where CheckFree is on.
``lr_scale``
    ``install(session, options) -> None`` once model and optimizer are built, on every process.
``norms``
    ``shard_grad_square(optimizer, model) -> float`` in each step, after ``prepare_grads`` and
    before clipping; summed over a stage's tensor-parallel peers it is the square of the norm.
``weights``
    ``plan_sources(lost, surviving, num_stages, *, options, norms) -> tuple[Source, ...] | None``:
    from which stages one is rebuilt, with normalised weights; None where there is no way.
``rebuild``
    ``rebuild(session, comm, sources, options) -> Moved`` on the process that takes the slot,
    ``sources`` a sequence of ``From(rank, stage, weight)``; for each of them, in this order,
    ``send_stage(session, comm, rank) -> Moved`` on the process that it names.
``lr_scale``
    ``note_rebuilt(session, stage, iteration) -> None`` after a rebuild, on every process.
"""
