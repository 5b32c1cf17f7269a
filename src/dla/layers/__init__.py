"""Layers: backbones that make q, k, v, decay and step, and the memories they are given."""

from dla.layers.attention import Attention, KVState
from dla.layers.deltanet import DeltaNet
from dla.layers.gated_deltanet import GatedDeltaNet
from dla.layers.linear import Linear
from dla.layers.mamba2 import Mamba2
from dla.layers.memory import (
    DynamicMemory,
    FactoredSlotWeights,
    LogLinearMemory,
    Memory,
    Operands,
    SingleMemory,
    SlotWeights,
)
from dla.layers.mlp import SwiGLU
from dla.layers.norms import GatedRMSNorm, RMSNorm
from dla.layers.packing import Packing, find_packing

__all__ = [
    "Attention",
    "DeltaNet",
    "DynamicMemory",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "KVState",
    "Linear",
    "LogLinearMemory",
    "Mamba2",
    "Memory",
    "Operands",
    "Packing",
    "RMSNorm",
    "SingleMemory",
    "SlotWeights",
    "FactoredSlotWeights",
    "SwiGLU",
    "find_packing",
]
