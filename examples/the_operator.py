"""The operator by itself: read a sequence in one call, look at what was kept, and go on token by token.

python examples/the_operator.py
"""

import torch

import dla

torch.manual_seed(0)
B, T, H, dk, dv, K = 1, 600, 2, 32, 32, 8  # one sequence of 600 tokens, two heads, at most eight states a head

# Six topics of a hundred tokens each: the tokens of a topic have similar keys and values.
topics = torch.randn(6, H, dk + dv).repeat_interleave(T // 6, 0) + 0.2 * torch.randn(T, H, dk + dv)
k, v = topics[None].split([dk, dv], -1)
q, lam = torch.randn(B, T, H, dk), torch.ones(B, T, H, K)  # lam: what a query gives each state

o, state = dla.dynamic_linear_attention(q, k, v, lam, tau=0.6, capacity=K, output_final_state=True)
print("outputs", tuple(o.shape), "| bytes held:", state.nbytes)
print("tokens in each state of head 0:", state.counts[0, 0][state.counts[0, 0] > 0].tolist())

# The same decisions, without the outputs: which tokens opened a state, and what was merged.
print(dla.segment(k, v, tau=0.6, capacity=K))

# One more token goes into the state that was carried: the decoding step.
one = [x[:, :1] for x in (q, k, v, lam)]
o, state = dla.dynamic_linear_attention(*one, tau=0.6, capacity=K, initial_state=state, output_final_state=True)
print(
    "after one more token:", int(state.counts[0, 0].sum()), "tokens in", int((state.counts[0, 0] > 0).sum()), "states"
)

# Which implementation ran, and why not a faster one.
with dla.record() as ran:
    dla.dynamic_linear_attention(q, k, v, lam, tau=0.6, capacity=K)
for stage in ran:
    print(stage.stage, "by", stage.backend, stage.kind, stage.passed_over)
