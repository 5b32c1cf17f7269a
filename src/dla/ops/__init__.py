"""Operators on tensors: dynamic, log-linear and linear attention; nothing here knows about models."""

from dla.ops import compiled as _compiled  # registers the operators with torch
from dla.ops.attention import dynamic_linear_attention, linear_attention, log_linear_attention, segment
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState, LinearState, LogLinearState, State, load_state

assert _compiled

__all__ = [
    "DynamicState",
    "LinearState",
    "LogLinearState",
    "Segmentation",
    "State",
    "dynamic_linear_attention",
    "linear_attention",
    "load_state",
    "log_linear_attention",
    "segment",
]
