"""CheckFree+'s twins: the embedding on the second stage, final norm and output layer on the last
but one.

A swapped microbatch embeds where it begins and gets its loss where it ends (arXiv 2506.15461), and
a lost first or last stage gets its ends back exactly. Twins stay equal to the originals as tied
embeddings do in Megatron: both get the sum of their gradients before the optimizer step. A twin is
marked ``shared``, so that gradient norm, zero counts and parameter norms leave it out.

With two stages each has both ends, one of them a twin. With three the middle one has both twins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import is_mxfp8_output_proj_active
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.schedule.passage import Passage, innermost

EMBEDDING = ("embedding.",)
HEAD = ("decoder.final_layernorm.", "output_layer.")


@dataclass(frozen=True)
class Pair:
    """Two stages that hold the same parameters."""

    group: dist.ProcessGroup
    """The slots of both, of one replica and one tensor-parallel index; the lower stage first."""
    original: int
    """The group rank of the stage that Megatron gives the parameters to."""
    prefixes: tuple[str, ...]
    """How the names of the parameters begin, on both."""


class TwinGPTModel(GPTModel):
    """A stage that embeds and computes losses as the microbatch under way asks for.

    Outside of the schedule executor it does what Megatron's does.
    """

    takes_passage = True
    passage: Passage | None = None
    pairs: tuple[Pair, ...] = ()
    """The ends that this stage shares with another one."""
    twins: tuple[str, ...] = ()
    """How the names of the twins on this stage begin."""

    def add_twins(self, scatter_to_sequence_parallel: bool) -> None:
        """Give this stage, which Megatron has built, its twins; equal only after ``tie``."""
        slots = dist.get_process_group_ranks(self.pp_group)
        stage, stages = self.pp_group.rank(), len(slots)
        if stages < 2:
            raise ValueError("twins need a neighbour: --pipeline-model-parallel-size of at least 2")
        ours = self._embeds, self._loses = stage == 0, stage == stages - 1
        embeds, loses = stage == 1, stage == stages - 2
        with self._uninitialised():
            if embeds:
                self.embedding = LanguageModelEmbedding(
                    config=self.config,
                    vocab_size=self.vocab_size,
                    max_sequence_length=self.max_sequence_length,
                    position_embedding_type=self.position_embedding_type,
                    scatter_to_sequence_parallel=scatter_to_sequence_parallel,
                    tp_group=self.pg_collection.tp,
                )
            if loses:
                self._add_head()
        self.twins = (*(EMBEDDING if embeds else ()), *(HEAD if loses else ()))
        for name, parameter in self.named_parameters():
            if name.startswith(self.twins or ("/",)):
                parameter.shared = True
        # As Megatron marks the originals, so that they are in the same groups of the optimizer.
        self.pre_process, self.post_process = ours[0] or embeds, ours[1] or loses
        self.setup_embeddings_and_output_layer()
        self.pre_process, self.post_process = ours
        self.pairs = self._pairs(slots, stage)
        self.register_load_state_dict_post_hook(_twins_may_be_missing)

    def _add_head(self) -> None:
        if is_mxfp8_output_proj_active(self.config):
            raise ValueError("CheckFree+ has no twin of an output layer in mxfp8")
        # What TransformerBlock and GPTModel build where post_process is true.
        self.decoder.final_layernorm = self.decoder.submodules.layer_norm(
            config=self.config,
            hidden_size=self.config.hidden_size,
            eps=self.config.layernorm_epsilon,
        )
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=not self.parallel_output,
            tp_group=self.pg_collection.tp,
        )

    @contextlib.contextmanager
    def _uninitialised(self) -> Iterator[None]:
        """Twins draw no random numbers: all other weights are those of a model without twins."""
        before = self.config.perform_initialization
        self.config.perform_initialization = False
        try:
            yield
        finally:
            self.config.perform_initialization = before

    def _pairs(self, slots: Sequence[int], stage: int) -> tuple[Pair, ...]:
        wanted = (((0, 1), 0, EMBEDDING), ((len(slots) - 2, len(slots) - 1), 1, HEAD))
        groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        pairs = []
        for pair, original, prefixes in wanted:
            if stage not in pair:
                continue
            if pair not in groups:  # with two stages both pairs are the same slots
                groups[pair] = dist.new_group(
                    [slots[i] for i in pair], use_local_synchronization=True
                )
            pairs.append(Pair(groups[pair], original, prefixes))
        return tuple(pairs)

    # -- passages ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's, with ends where the microbatch begins or ends its route."""
        at = self.passage
        enters, leaves = (self._embeds, self._loses) if at is None else (at.enters, at.leaves)
        norm = self.decoder.final_layernorm
        self.pre_process = self.decoder.pre_process = enters
        self.post_process = self.decoder.post_process = leaves
        if not leaves:
            self.decoder.final_layernorm = None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.pre_process = self.decoder.pre_process = self._embeds
            self.post_process = self.decoder.post_process = self._loses
            self.decoder.final_layernorm = norm

    @property
    def leaves(self) -> bool:
        """Whether this stage computes the loss of the microbatch under way."""
        return self._loses if self.passage is None else self.passage.leaves

    # -- checkpoints -------------------------------------------------------------------------------

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        """Megatron's; twins are further replicas of the originals, so that what is saved does not
        change, and loading fills both."""
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        for key, entry in state.items():
            if self.twins and key.removeprefix(prefix).startswith(self.twins):
                entry.replica_id = (1, *entry.replica_id[1:])
                if key == f"{prefix}output_layer.weight":
                    entry.allow_shape_mismatch = True
        return state

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Megatron's, without twins: a file of a stage is what Megatron's own model wants."""
        state = super().state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)
        for key in [k for k in state if k.removeprefix(prefix).startswith(self.twins or ("/",))]:
            del state[key]
        return state


def _twins_may_be_missing(model: Any, incompatible: Any) -> None:
    """``restore`` gets them from the originals."""
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.startswith(model.twins or ("/",))]


class PassageFloat16Module(Float16Module):
    """Megatron's half-precision wrapper, which makes losses fp32 and leaves activations alone."""

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        return super().forward(*inputs, fp32_output=fp32_output and self.module.leaves, **kwargs)


class TwinModelBuilder(GPTModelBuilder):
    """Megatron's builder of LLaMA-like models, with twins."""

    def build_model(self, *args: Any, **kwargs: Any) -> TwinGPTModel:
        """One stage."""
        model = super().build_model(*args, **kwargs)
        # Megatron's builder names its class and passes it twenty settings: none is repeated here.
        model.__class__ = TwinGPTModel
        assert isinstance(model, TwinGPTModel)
        model.add_twins(self._model_config.scatter_embedding_sequence_parallel)
        return model

    def build_distributed_models(self, *args: Any, **kwargs: Any) -> list[Any]:
        """This slot's stage, wrapped, its twins equal to the originals."""
        kwargs.setdefault("mixed_precision_wrapper", PassageFloat16Module)
        models: list[Any] = super().build_distributed_models(*args, **kwargs)
        tie(models)
        return models


class TwinModelConfig(GPTModelConfig):
    """Megatron's configuration; names another builder."""

    builder = f"{TwinModelBuilder.__module__}.{TwinModelBuilder.__qualname__}"


def model_config_class(options: CheckfreeOptions) -> type[GPTModelConfig]:
    """What ``gpt_config_from_args`` takes as ``model_config_cls``."""
    return TwinModelConfig if options.plus else GPTModelConfig


# -- keeping them equal ----------------------------------------------------------------------------


def shared_parameters(model: Any) -> Iterator[tuple[Pair, str, torch.nn.Parameter]]:
    """The parameters of a chunk that another stage has too, in the same order on both."""
    inner = innermost(model)
    named = dict(inner.named_parameters()) if getattr(inner, "pairs", ()) else {}
    for pair in getattr(inner, "pairs", ()):
        for name in sorted(n for n in named if n.startswith(pair.prefixes)):
            yield pair, name, named[name]


def is_twin(parameter: torch.Tensor) -> bool:
    """Whether a parameter, or the optimizer's copy of one, is a twin and not the original."""
    return bool(getattr(parameter, "shared", False))


@torch.no_grad()
def tie(models: Sequence[Any]) -> None:
    """Make twins equal to the originals; collective over each pair."""
    for model in models:
        for pair, _, parameter in shared_parameters(model):
            dist.broadcast(parameter.data, group=pair.group, group_src=pair.original)


@torch.no_grad()
def reduce_grads(models: Sequence[Any]) -> None:
    """Give originals and twins the sum of their gradients; collective over each pair.

    After the reduction over the replicas and before the division by the number of tokens.
    """
    for model in models:
        for pair, _, parameter in shared_parameters(model):
            dist.all_reduce(parameter.main_grad, group=pair.group)
