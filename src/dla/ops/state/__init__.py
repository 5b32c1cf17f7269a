"""What the operators carry between calls.

States are values: an operator changes one only when it is told so by ``inplace=True``. How a state is held is known in
this folder alone; everybody else asks by the few operations that ``dynamic.py`` begins with.
"""

from dla.ops.state.base import State, load_state
from dla.ops.state.dynamic import DynamicState
from dla.ops.state.matrices import LinearState, LogLinearState

__all__ = ["DynamicState", "LinearState", "LogLinearState", "State", "load_state"]
