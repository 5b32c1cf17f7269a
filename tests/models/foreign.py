"""Tiny checkpoints as others write them, and what their models compute, step by step in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

WIDTH, LAYERS = 16, 2
Config = dict[str, Any]
Tensors = dict[str, Tensor]


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) * 0.5
        made[name] = (tensor + 1 if "norm" in name else tensor).to(dtype)
    return made


def state_spaces_config(**changes: Any) -> Config:
    """As state-spaces/mamba2-... have it; ``ssm_cfg`` is merged in."""
    ssm = {"layer": "Mamba2", "d_state": 4, "headdim": 8, **changes.pop("ssm_cfg", {})}
    config = {
        "d_model": WIDTH,
        "d_intermediate": 0,
        "n_layer": LAYERS,
        "vocab_size": 13,
        "ssm_cfg": ssm,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }
    return config | changes


def state_spaces_tensors(config: Config, dtype: torch.dtype = torch.float32) -> Tensors:
    ssm = config["ssm_cfg"]
    inner, mlp = 2 * WIDTH, -(-config["d_intermediate"] // 128) * 128
    heads, keys = inner // ssm["headdim"], ssm.get("ngroups", 1) * ssm["d_state"]
    conv, rows = inner + 2 * keys, 2 * inner + 2 * keys + heads
    shapes: dict[str, tuple[int, ...]] = {"backbone.embedding.weight": (16, WIDTH)}
    for layer in range(config["n_layer"]):
        at = f"backbone.layers.{layer}."
        shapes |= {f"{at}mixer.{name}": (heads,) for name in ("dt_bias", "A_log", "D")}
        shapes |= {f"{at}mixer.in_proj.weight": (rows, WIDTH), f"{at}mixer.out_proj.weight": (WIDTH, inner)}
        shapes |= {f"{at}mixer.conv1d.weight": (conv, 1, 4), f"{at}mixer.norm.weight": (inner,)}
        shapes[f"{at}norm.weight"] = (WIDTH,)
        if ssm.get("conv_bias", True):
            shapes[f"{at}mixer.conv1d.bias"] = (conv,)
        if ssm.get("bias", False):
            shapes |= {f"{at}mixer.in_proj.bias": (rows,), f"{at}mixer.out_proj.bias": (WIDTH,)}
        if mlp:
            shapes |= {f"{at}mlp.fc1.weight": (2 * mlp, WIDTH), f"{at}mlp.fc2.weight": (WIDTH, mlp)}
            shapes[f"{at}norm2.weight"] = (WIDTH,)
    shapes["backbone.norm_f.weight"] = (WIDTH,)
    shapes["lm_head.weight"] = (16, WIDTH)
    tensors = random_tensors(shapes, dtype)
    if config["tie_embeddings"]:
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    return tensors


def write_state_spaces(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Config, Tensors]:
    config = state_spaces_config(**changes)
    tensors = state_spaces_tensors(config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return config, tensors


def fla_config(**changes: Any) -> Config:
    config = {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "attn": None,
        "attn_mode": "chunk",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": 16,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 4,
        "expand_v": 1.5,
        "hidden_ratio": 4,
        "intermediate_size": None,
        "hidden_act": "swish",
        "use_gate": True,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "fuse_norm": True,
        "max_position_embeddings": 2048,
    }
    return config | changes


def fla_tensors(config: Config, dtype: torch.dtype = torch.float32) -> Tensors:
    heads = config["num_v_heads"] or config["num_heads"]
    keys, values = config["num_heads"] * config["head_dim"], heads * int(config["head_dim"] * config["expand_v"])
    mlp = config["intermediate_size"] or 256  # the least they round to
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (16, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}attn_norm.weight": (WIDTH,), f"{at}mlp_norm.weight": (WIDTH,)}
        shapes |= {f"{at}attn.{name}_proj.weight": (keys, WIDTH) for name in "qk"}
        shapes |= {f"{at}attn.{name}_proj.weight": (heads, WIDTH) for name in "ab"}
        shapes |= {f"{at}attn.v_proj.weight": (values, WIDTH), f"{at}attn.o_proj.weight": (WIDTH, values)}
        shapes |= {f"{at}attn.A_log": (heads,), f"{at}attn.dt_bias": (heads,)}
        shapes[f"{at}attn.o_norm.weight"] = (values // heads,)
        if config["use_gate"]:
            shapes[f"{at}attn.g_proj.weight"] = (values, WIDTH)
        if config["use_short_conv"]:
            sizes = {"q": keys, "k": keys, "v": values}
            shapes |= {f"{at}attn.{name}_conv1d.weight": (rows, 1, 4) for name, rows in sizes.items()}
        shapes |= {f"{at}mlp.{name}_proj.weight": (mlp, WIDTH) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (WIDTH, mlp)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (16, WIDTH)
    return random_tensors(shapes, dtype, seed=1)


def write_fla(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Config, Tensors]:
    config = fla_config(**changes)
    tensors = fla_tensors(config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return config, tensors


# What they compute. One sequence at a time: tokens [T] -> logits [T, vocab].


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, channels], with its SiLU"""
    padded = F.pad(x.T, (weight.shape[-1] - 1, 0))[None]
    return F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])[0].T)


def state_spaces_logits(config: Config, tensors: Tensors, tokens: Tensor) -> Tensor:
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    x = tensors["backbone.embedding.weight"][tokens]
    for layer in range(config["n_layer"]):
        at = f"backbone.layers.{layer}."
        own = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
        x = x + mamba2(config["ssm_cfg"], own, rms_norm(x, own["norm.weight"], 1e-5))
        if "mlp.fc1.weight" in own:
            y, gate = (rms_norm(x, own["norm2.weight"], 1e-5) @ own["mlp.fc1.weight"].T).chunk(2, -1)
            x = x + (y * F.silu(gate)) @ own["mlp.fc2.weight"].T
    return rms_norm(x, tensors["backbone.norm_f.weight"], 1e-5) @ tensors["lm_head.weight"].T


def mamba2(ssm: Config, own: Tensors, x: Tensor) -> Tensor:
    groups, n, p = ssm.get("ngroups", 1), ssm["d_state"], ssm["headdim"]
    inner = 2 * WIDTH
    heads = inner // p
    mixed = F.linear(x, own["mixer.in_proj.weight"], own.get("mixer.in_proj.bias"))
    z, xbc, dt = mixed.split([inner, inner + 2 * groups * n, heads], -1)
    xbc = causal_conv(xbc, own["mixer.conv1d.weight"], own.get("mixer.conv1d.bias"))
    v, b, c = xbc.split([inner, groups * n, groups * n], -1)
    low, high = ssm.get("dt_limit", (0.0, float("inf")))
    dt = F.softplus(dt + own["mixer.dt_bias"]).clamp(low, high)
    decay = (-dt * own["mixer.A_log"].exp()).exp()
    v = v.unflatten(-1, (heads, p))
    b, c = (y.unflatten(-1, (groups, n)).repeat_interleave(heads // groups, 1) for y in (b, c))
    state, rows = v.new_zeros(heads, p, n), []
    for t in range(len(x)):
        state = state * decay[t, :, None, None] + (dt[t, :, None] * v[t])[..., None] * b[t][:, None]
        rows.append((state * c[t][:, None]).sum(-1) + own["mixer.D"][:, None] * v[t])
    y = (torch.stack(rows).flatten(1) * F.silu(z)).unflatten(-1, (groups, -1))
    y = rms_norm(y, own["mixer.norm.weight"].unflatten(0, (groups, -1)), 1e-5).flatten(1)
    return F.linear(y, own["mixer.out_proj.weight"], own.get("mixer.out_proj.bias"))


def fla_logits(config: Config, tensors: Tensors, tokens: Tensor) -> Tensor:
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    eps = config["norm_eps"]
    x = tensors["model.embeddings.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
        x = x + gated_deltanet(config, own, rms_norm(x, own["attn_norm.weight"], eps))
        y = rms_norm(x, own["mlp_norm.weight"], eps)
        y = F.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + y @ own["mlp.down_proj.weight"].T
    head = tensors.get("lm_head.weight", tensors["model.embeddings.weight"])
    return rms_norm(x, tensors["model.norm.weight"], eps) @ head.T


def gated_deltanet(config: Config, own: Tensors, x: Tensor) -> Tensor:
    heads, key_heads, dk = config["num_v_heads"] or config["num_heads"], config["num_heads"], config["head_dim"]
    parts = {}
    for name in "qkv":
        part = x @ own[f"attn.{name}_proj.weight"].T
        conv = own.get(f"attn.{name}_conv1d.weight")
        parts[name] = F.silu(part) if conv is None else causal_conv(part, conv)
    q, k = (parts[name].unflatten(-1, (key_heads, dk)).repeat_interleave(heads // key_heads, 1) for name in "qk")
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    v = parts["v"].unflatten(-1, (heads, -1))
    beta = torch.sigmoid(x @ own["attn.b_proj.weight"].T) * (2 if config["allow_neg_eigval"] else 1)
    step = F.softplus(x @ own["attn.a_proj.weight"].T + own["attn.dt_bias"])
    decay = (-step * own["attn.A_log"].exp()).exp()
    state, rows = v.new_zeros(heads, dk, v.shape[-1]), []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        error = v[t] - (k[t][..., None] * state).sum(1)
        state = state + k[t][..., None] * (beta[t, :, None] * error)[:, None]
        rows.append((q[t][..., None] * state).sum(1) * dk**-0.5)
    y = rms_norm(torch.stack(rows), own["attn.o_norm.weight"], config["norm_eps"])
    if config["use_gate"]:
        y = y * F.silu((x @ own["attn.g_proj.weight"].T).unflatten(-1, (heads, -1)))
    return y.flatten(1) @ own["attn.o_proj.weight"].T
