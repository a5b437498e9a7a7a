"""The Neural Data Router from its formulas, entry by entry, with weights named as in golden files.

Masks are as in the golden files: True where a key is hidden.
"""

import math

import torch


def random_attention(*, n_heads, d_model, d_head, kind, seed=0):
    """Random weights of an attention, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {name: normal(n_heads, d_model, d_head) for name in ("W_Q", "W_K", "W_V")}
    weights |= {"W_O": normal(n_heads, d_head, d_model), "content_bias": normal(n_heads, d_head)}
    weights |= {"scale": 0.3 + 0.1 * normal(1)}
    if kind == "geometric":
        weights |= {"W_dir": normal(n_heads, d_model, 2), "b_dir": normal(n_heads, 2)}
        return weights | {"scale_pos": normal(1), "s_bias": normal(1)}
    weights |= {"W_pos": normal(n_heads, d_model, d_head), "pos_bias": normal(n_heads, d_head)}
    if kind == "absgate":
        weights |= {"W_absgate": normal(n_heads, d_model), "b_absgate": normal(n_heads)}
    return weights


def random_layer(*, d_mlp, d_gate, n_gates, kind, n_heads=3, d_model=12, seed=0):
    """Random weights of a gated layer, float64; its attention is under `att.`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return 0.4 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    attention = random_attention(
        n_heads=n_heads, d_model=d_model, d_head=d_model // n_heads, kind=kind, seed=seed
    )
    weights = {f"att.{name}": weight for name, weight in attention.items()}
    shapes = {"data1": (d_model, d_mlp), "data2": (d_mlp, d_model)}
    shapes |= {"gate1": (d_model, d_gate), "gate2": (d_gate, n_gates)}
    for name, shape in shapes.items():
        weights |= {f"W_{name}": normal(*shape), f"b_{name}": normal(shape[1])}
    for norm in ("ln_merge", "ln_out")[: 1 + (kind == "geometric")]:
        weights |= {f"{norm}.w": 1 + normal(d_model), f"{norm}.b": normal(d_model)}
    return weights


def sinusoid(position, d_model):
    channels = [
        wave(position / 1e4 ** (2 * pair / d_model))
        for pair in range(d_model // 2)
        for wave in (math.sin, math.cos)
    ]
    return torch.tensor(channels, dtype=torch.float64)


def geometric_attention(w, x_kv, *, normalize, offset=0, pad_mask=None, position_mask=None):
    """The output for queries at the positions from `offset` on, and the weights."""
    batch, n_key, d_model = x_kv.shape
    n_query, n_heads = n_key - offset, len(w["W_Q"])
    out = torch.zeros(batch, n_query, d_model, dtype=x_kv.dtype)
    patterns = torch.zeros(batch, n_heads, n_query, n_key, dtype=x_kv.dtype)
    for b in range(batch):
        for h in range(n_heads):
            for row in range(n_query):
                i = row + offset
                q = x_kv[b, i] @ w["W_Q"][h] + w["content_bias"][h]
                back, front = x_kv[b, i] @ w["W_dir"][h] + w["b_dir"][h]
                p = []
                for j in range(n_key):
                    content = w["scale"] * (q @ (x_kv[b, j] @ w["W_K"][h]))
                    direction = w["scale_pos"] * (front if j > i else back)
                    hidden = j == i or (pad_mask is not None and bool(pad_mask[b, j]))
                    hidden |= position_mask is not None and bool(position_mask[row, j])
                    p.append(torch.sigmoid(content + direction + w["s_bias"]) * (not hidden))
                weights = []
                for j in range(n_key):
                    weight = p[j]
                    for k in range(n_key):
                        nearer = abs(i - k) < abs(i - j) or (abs(i - k) == abs(i - j) and k > i)
                        if nearer and k not in (i, j):
                            weight = weight * (1 - p[k])
                    weights.append(weight)
                weights = torch.cat(weights)
                if normalize:
                    weights = weights / weights.sum().clamp(min=1e-12)
                patterns[b, h, row] = weights
                out[b, row] = out[b, row] + weights @ (x_kv[b] @ w["W_V"][h]) @ w["W_O"][h]
    return out, patterns


def relative_attention(w, x, *, pad_mask=None):
    """The output and the weights; with the abs/rel gate if there are weights of it."""
    batch, n, d_model = x.shape
    n_heads = len(w["W_Q"])
    out = torch.zeros_like(x)
    patterns = torch.zeros(batch, n_heads, n, n, dtype=x.dtype)
    for b in range(batch):
        for h in range(n_heads):
            for i in range(n):
                q, gate = x[b, i] @ w["W_Q"][h], 1.0
                if "W_absgate" in w:
                    gate = torch.sigmoid(x[b, i] @ w["W_absgate"][h] + w["b_absgate"][h])
                scores = torch.full((n,), -math.inf, dtype=x.dtype)
                for j in range(n):
                    if pad_mask is not None and pad_mask[b, j]:
                        continue
                    content = (q + w["content_bias"][h]) @ (x[b, j] @ w["W_K"][h])
                    relative, absolute = (
                        (q + w["pos_bias"][h]) @ (sinusoid(place, d_model) @ w["W_pos"][h])
                        for place in (j - i, j)
                    )
                    position = gate * relative + (1 - gate) * absolute
                    scores[j] = (w["scale"] * (content + position))[0]
                patterns[b, h, i] = scores.softmax(0)
                out[b, i] += patterns[b, h, i] @ (x[b] @ w["W_V"][h]) @ w["W_O"][h]
    return out, patterns


def layer_norm(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return w * centred / (centred**2).mean(-1, keepdim=True).add(1e-5).sqrt() + b


def part(weights, prefix):
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def layer(w, h, *, normalize=False, pad_mask=None):
    """One step of a gated layer: the states, the gates and their logits."""
    if "att.W_dir" in w:
        attended, _ = geometric_attention(
            part(w, "att."), h, normalize=normalize, pad_mask=pad_mask
        )
    else:
        attended, _ = relative_attention(part(w, "att."), h, pad_mask=pad_mask)
    merged = layer_norm(h + attended, w["ln_merge.w"], w["ln_merge.b"])
    update = (merged @ w["W_data1"] + w["b_data1"]).relu() @ w["W_data2"] + w["b_data2"]
    bounded = "ln_out.w" not in w
    update = update.tanh() if bounded else layer_norm(update, w["ln_out.w"], w["ln_out.b"])
    logit = (merged @ w["W_gate1"] + w["b_gate1"]).relu() @ w["W_gate2"] + w["b_gate2"]
    gate = logit.sigmoid()
    return gate * update + (1 - gate) * h, gate, logit


def classifier(w, tokens, lengths, *, n_steps, readout, normalize):
    """The logits [batch, d_output], one sequence at a time, so that there is no padding."""
    eos, logits = len(w["embed"]) - 2, []
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        h = w["embed"][[eos + 1, *row[:length], eos]][None]
        for _ in range(n_steps):
            h, _, _ = layer(part(w, "layer."), h, normalize=normalize)
        column = h[0, 0] if readout == "first" else h[0, -1]
        logits.append(column @ w["W_out"] + w["b_out"])
    return torch.stack(logits)
