"""A Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU, and an untied head.

In:   tokens int64 [batch, seq]; in later pipeline stages activations [seq, batch, hidden].
Out:  activations; from the last stage the mean loss, or logits [seq, batch, vocab].
Next: FlatFSDP shards it, `parallel.FlatStage` runs it under a schedule.

Shapes in names: b = batch, s = sequence, h = hidden, v = vocabulary.  With sequence parallelism each
tensor-parallel rank has 1 / tp of the sequence between layers; with tensor parallelism 1 / tp of the logits.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.rng import seeded
from flatfsdp.contract.tensor_parallel import TensorParallel
from flatfsdp.flat.meta_device import materialize
from flatfsdp.fp8 import Recipe, autocast
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers import (
    Embedding,
    LinearCrossEntropy,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    cross_entropy,
)
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.layers.checks import require_fp8_shape
from flatfsdp.layers.layer_options import MatmulOptions
from flatfsdp.layers.shared import InitMethod
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.models.config import LlamaConfig


class Llama(nn.Module):
    """The whole model, or some of its layers: one stage of a pipeline.

        config = PRESETS["1b"]
        model = Llama(config)                                                   # all of it
        part = Llama(config, stage_layers(config.layers, 2)[mesh.pp_rank])      # one of two stages
        loss = model(tokens, targets)

    A stage's parameters have the names and the initial values of the whole model in one process.

    Args:
        config: sizes of the model.
        layers: consecutive layers; default: all.  The first one comes with the embedding, the last one with
            the final norm and the head.
        tp_group: tensor-parallel ranks that share every layer.
        tp_size: size of the group; may be left out.  Without the group the model cannot compute, but has the
            right parameter shapes, which `plan` uses.
        sequence_parallel: split activations between layers over the tensor-parallel ranks along the sequence.
        tp_overlap: overlap tensor-parallel communication with GEMMs, on GPUs.
        fuse_wgrad_accumulation: add weight gradients to FP32 `main_grad` buffers in the GEMM.
        recipe: recipe of FP8 GEMMs, in the layers only; None: GEMMs are in the parameters' dtype.
        amax_group: ranks that share scales; default: those with this stage, if it is a `FlatStage`, else all.
        seed: seed of the initial values.
        params_dtype: dtype of the parameters; default: torch's default dtype.
        device: device of the parameters; default: torch's.  On "meta" they get values later: pass
            `initialize` to FlatFSDP as `param_init_fn`.

    Attributes:
        embedding, norm, head: None in stages without them.
        layers: by their number in the whole model.

    Raises:
        ValueError: if `layers` are not layers of the model; if a size, even one that only another stage has,
            does not divide evenly over the tensor-parallel ranks; with a recipe, if a size does not suit FP8.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: range | None = None,
        *,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_overlap: bool = False,
        fuse_wgrad_accumulation: FuseWgrad = False,
        recipe: Recipe | None = None,
        amax_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        layers = range(config.layers) if layers is None else layers
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.layers:
            raise ValueError(f"the model has layers 0 to {config.layers - 1}; {layers} are not some of them")
        self.config = config
        self.recipe = recipe
        self.amax_group = amax_group
        self.seed = seed
        self.parallel = TensorParallel.of("Llama", tp_group, tp_size, sequence_parallel, tp_overlap)
        # Checked in every stage, so that all raise together and none waits.
        self.parallel.share("Llama", "vocab", config.vocab)
        self.rotary = RotaryPositionEmbedding(config.head_dim, rotary_base=config.rope_theta)
        options: MatmulOptions = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype,
            "device": "meta",
            "tp_group": tp_group,
            "tp_size": self.parallel.ranks.size,
            "sequence_parallel": self.parallel.sequence_parallel,
            "tp_overlap": self.parallel.overlap,
        }
        # GEMMs keep the scale of their input; those that add to the residual stream start smaller.
        inner, to_residual = (_normal((times * config.hidden) ** -0.5) for times in (1, 2 * config.layers))
        # In the order of the forward.
        self.embedding: Embedding | None = None
        if layers.start == 0:
            self.embedding = Embedding(
                config.vocab,
                config.hidden,
                init_method=_normal(1.0),
                params_dtype=params_dtype,
                device="meta",
                fuse_wgrad_accumulation=bool(fuse_wgrad_accumulation),
                tp_group=tp_group,
                tp_size=self.parallel.ranks.size,
                sequence_parallel=self.parallel.sequence_parallel,
            )
        self.layers = nn.ModuleDict()
        for number in layers:
            self.layers[str(number)] = TransformerLayer(
                config.hidden,
                config.ffn,
                config.heads,
                config.kv_heads,
                config.norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                init_method=inner,
                output_layer_init_method=to_residual,
                bias=False,
                activation="swiglu",
                normalization="RMSNorm",
                fuse_qkv_params=True,
                set_parallel_mode=True,
                **options,
            )
        if recipe is not None:
            # All stages have such layers, so that all raise together.
            self.require_fp8_shapes(ALIGNMENT)
        self.norm: RMSNorm | None = None
        self.head: LinearCrossEntropy | None = None
        if layers.stop == config.layers:
            sequence_parallel = self.parallel.sequence_parallel
            self.norm = RMSNorm(
                config.hidden, config.norm_eps, sequence_parallel, params_dtype, device="meta"
            )
            self.head = LinearCrossEntropy(
                config.hidden, config.vocab, init_method=inner, parallel_mode="column", **options
            )
        self._names = {owner: name for name, owner in self.named_modules()}
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            owners = [(name, owner) for owner, name in self._names.items()]
            materialize(owners, device, self.initialize)

    def require_fp8_shapes(self, tokens: int) -> None:
        """Checks that all GEMMs of the layers suit FP8, for `tokens` tokens.

        Raises:
            ValueError: if a size is not a multiple of 16.
        """
        for layer in self.layers.modules():
            if isinstance(layer, MatmulLayer):
                for name in layer.linear_maps:
                    out_features, in_features = layer.get_parameter(name).shape
                    require_fp8_shape(layer, name, tokens, in_features, out_features)

    def initialize(self, owner: nn.Module) -> None:
        """Fills the parameters of one of the model's modules, from the seed and its name."""
        with seeded(self.seed, self._names[owner]):
            owner.reset_parameters()  # type: ignore[operator]

    def forward(
        self, inputs: Tensor, targets_bs: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Activations [s, b, h]; in the last stage the mean loss with targets, else logits [s, b, v].

        Args:
            inputs: tokens [b, s] or, in a stage without the embedding, activations.
            targets_bs: tokens; only for the last stage.
            is_first_microbatch: True casts the FP8 weights and keeps them, False reuses them, None casts
                every time.

        Raises:
            ValueError: if the sequence is longer than `config.seq`.
        """
        x_sbh = inputs
        if self.embedding is not None:
            if inputs.shape[1] > self.config.seq:
                raise ValueError(f"a sequence of {inputs.shape[1]} tokens is longer than {self.config.seq}")
            x_sbh = self.embedding(inputs.t(), is_first_microbatch)
        rope = self.rotary(self.config.seq, x_sbh.device)
        is_fp8 = self.recipe is not None
        with autocast(recipe=self.recipe, amax_reduction_group=self.amax_group) if is_fp8 else nullcontext():
            for layer in self.layers.values():
                x_sbh = layer(x_sbh, is_first_microbatch=is_first_microbatch, rotary_pos_emb=rope)
        if self.norm is None or self.head is None:
            return x_sbh
        x_sbh = self.norm(x_sbh)
        targets_sb = None if targets_bs is None else targets_bs.t()
        loss_or_logits_sbv: Tensor = self.head(x_sbh, targets_sb, is_first_microbatch)
        return loss_or_logits_sbv

    def loss(self, logits_sbv: Tensor, targets_bs: Tensor) -> Tensor:
        """The mean cross-entropy in nats, FP32, 0-dim; use it as a schedule's `loss_fn`.

        Its gradient overwrites the logits: do not let the schedule return them (`return_outputs=False`).
        """
        return cross_entropy(
            logits_sbv,
            targets_bs.t(),
            tp_group=self.parallel.ranks.group,
            # A schedule finds out shapes with leaves, which must not be overwritten.
            inplace_backward=not logits_sbv.is_leaf,
        )


def _normal(std: float) -> InitMethod:
    return partial(nn.init.normal_, std=std)
