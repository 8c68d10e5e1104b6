"""The recurrences of the golden cases token by token in f64, from PyTorch operations, with
gradients: what both sides of peer_errors.py are held against once inputs are rounded."""
import torch


def _per_value_head(x, heads):
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _walk(step, state, length):
    outputs = []
    for t in range(length):
        state, y = step(state, t)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def _delta(x, scale):
    """S ← Diag(e^g) S; S ← S + k (w∘v − Sᵀ(b∘k))ᵀ; o = scale Sᵀq. One β is both b and w."""
    v = x["v"]
    B, T, H, V = v.shape
    q, k = _per_value_head(x["q"], H), _per_value_head(x["k"], H)
    g = x["g"] if x["g"].dim() == 4 else x["g"][..., None]
    b, w = (x["b"], x["w"]) if "b" in x else (x["beta"][..., None],) * 2

    def step(S, t):
        S = g[:, t, :, :, None].exp() * S  # [B,H,K,V]
        u = w[:, t] * v[:, t] - torch.einsum("bhkv,bhk->bhv", S, b[:, t] * k[:, t])
        S = S + k[:, t, :, :, None] * u[:, :, None]
        return S, scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t])
    return _walk(step, x.get("h0", v.new_zeros(B, H, k.shape[3], V)), T)


def _rwkv7(x, scale):
    """S ← Diag(e^w) S + b (Sᵀa)ᵀ + k vᵀ, where Sᵀa is taken before the decay; o = scale Sᵀr."""
    r, w, k, v, a, b = (x[n] for n in "rwkvab")
    B, T, H, V = v.shape

    def step(S, t):
        low_rank = torch.einsum("bhkv,bhk->bhv", S, a[:, t])
        S = (w[:, t, :, :, None].exp() * S + b[:, t, :, :, None] * low_rank[:, :, None]
             + k[:, t, :, :, None] * v[:, t, :, None])
        return S, scale * torch.einsum("bhkv,bhk->bhv", S, r[:, t])
    return _walk(step, x.get("h0", v.new_zeros(B, H, k.shape[3], V)), T)


def _linear(x, scale):
    """S ← Diag(e^g) S + k vᵀ; o = scale Sᵀq."""
    q, k, v = x["q"], x["k"], x["v"]
    B, T, H, V = v.shape
    g = x["g"] if x["g"].dim() == 4 else x["g"][..., None]

    def step(S, t):
        S = g[:, t, :, :, None].exp() * S + k[:, t, :, :, None] * v[:, t, :, None]
        return S, scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t])
    return _walk(step, x.get("h0", v.new_zeros(B, H, k.shape[3], V)), T)


def _ssd(x, _):
    """d = softplus(dt + bias); h ← e^{dA} h + d x Bᵀ [P,N]; y = h C + D x."""
    u = x["x"]
    batch, T, H, P = u.shape
    b, c = _per_value_head(x["B"], H), _per_value_head(x["C"], H)
    d = torch.nn.functional.softplus(x["dt"] + x.get("dt_bias", 0.0))
    skip = x["D"][:, None] if "D" in x else 0.0

    def step(h, t):
        h = ((d[:, t] * x["A"]).exp()[..., None, None] * h
             + (d[:, t, :, None] * u[:, t])[..., None] * b[:, t, :, None])
        return h, torch.einsum("bhpn,bhn->bhp", h, c[:, t]) + skip * u[:, t]
    return _walk(step, x.get("h0", u.new_zeros(batch, H, P, b.shape[3])), T)


def run(op, scale, inputs, upstream):
    """inputs: name -> f64 leaf; upstream: "out.*" -> gradient. Outputs and gradients by the golden
    files' names."""
    step = {"rwkv7": _rwkv7, "gla": _linear, "simple_gla": _linear, "ssd": _ssd}.get(op, _delta)
    first, ht = step(inputs, scale)
    outputs = {"out.y" if op == "ssd" else "out.o": first, "out.ht": ht}
    wanted = [k for k in outputs if k in upstream]
    grads = torch.autograd.grad([outputs[k] for k in wanted], list(inputs.values()),
                                [upstream[k] for k in wanted], allow_unused=True)
    return {**{k: y.detach() for k, y in outputs.items()},
            **{f"grad.{k}": g for k, g in zip(inputs, grads) if g is not None}}
