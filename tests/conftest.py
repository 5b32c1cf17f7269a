import os

import torch
from hypothesis import settings

# One thread a worker: pytest-xdist already uses the cores. No deadlines: the first call of an operator is slow.
torch.set_num_threads(1)
settings.register_profile("default", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
