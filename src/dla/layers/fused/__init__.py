"""Pieces of layers in C++ for CPUs: each does in one pass what torch does in a dozen, with its gradient.

At the lab's sizes a training step is many small operations, most of whose time goes to memory and to calls. Every piece
has a torch composition beside it, in the layer that uses it, which is what it is tested against and what runs
everywhere else: on GPUs, in other dtypes, under autocast, torch.compile and transforms, and without the compiled
library. Nothing changes but rounding.
"""

from dla.layers.fused.conv import conv_silu
from dla.layers.fused.dense import dense, linear, projections, split_linear, swiglu_mlp
from dla.layers.fused.entropy import token_entropy
from dla.layers.fused.norm import gated_norm, unit_vectors
from dla.layers.fused.softplus import scaled_softplus
from dla.layers.fused.step import time_step
from dla.layers.fused.when import fusable, plain

__all__ = [
    "conv_silu",
    "dense",
    "fusable",
    "gated_norm",
    "linear",
    "plain",
    "projections",
    "scaled_softplus",
    "split_linear",
    "swiglu_mlp",
    "time_step",
    "token_entropy",
    "unit_vectors",
]
