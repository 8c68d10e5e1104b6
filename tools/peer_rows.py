"""The public kernels that rows of `ebb bench ops` are compared with, on the same shapes: what
bench_peers.py measures. Inputs are drawn as models give them; libraries are imported by the row
that needs them."""
import dataclasses
from typing import Callable

try:
    import torch
    import torch.nn.functional as F
except ImportError:  # the rows can be listed without
    torch = None


class Setting:
    """Where the rows run. tiny: the same calls on short inputs, for a machine without a GPU."""
    device, dtype, tiny = "cuda", torch and torch.bfloat16, False


@dataclasses.dataclass
class Peer:
    row: str  # of `ebb bench ops`: "op shape"
    library: str
    make: Callable  # () -> Case
    variant: str = ""  # where a row has several peers
    parts: int = 1  # processes among which --warm divides the kernels' configurations
    like: str = ""  # name of an earlier row that compiles the same kernels

    @property
    def name(self):
        return f"{self.row} [{self.variant}]" if self.variant else self.row


@dataclasses.dataclass
class Case:
    inputs: list | None  # gradients are taken of these; None: no backward pass
    forward: Callable
    whole: bool = False  # `forward` stands for forward and backward pass together


def rand(*shape, dtype=None, scale=1.0, grad=True):
    x = torch.randn(*shape, device=Setting.device) * scale
    return x.to(dtype or Setting.dtype).requires_grad_(grad)


def uniform(*shape, low=0.0, high=1.0, dtype=None):
    x = torch.rand(*shape, device=Setting.device) * (high - low) + low
    return x.to(dtype or torch.float32).requires_grad_()


def unit(*shape):
    return F.normalize(torch.randn(*shape, device=Setting.device), dim=-1)


def log_decays(*shape):
    return F.logsigmoid(torch.randn(*shape, device=Setting.device)).requires_grad_()


def short(batch, time, heads):
    return (1, min(time, 96), min(heads, 2)) if Setting.tiny else (batch, time, heads)


def tokens(n):
    return 96 if Setting.tiny else n


# Bandwidth-bound operators.

def rms_norm(residual):
    from fla.modules.layernorm import rms_norm
    x, w = rand(1, tokens(32768), 512), rand(512)
    if not residual:
        return Case([x, w], lambda: rms_norm(x, w, None, eps=1e-6))
    r = rand(1, tokens(32768), 512)
    return Case([x, r, w], lambda: rms_norm(x, w, None, residual=r, eps=1e-6, prenorm=True))


def l2_norm():
    from fla.modules.l2norm import l2norm
    x = rand(1, tokens(32768), 8, 64)
    return Case([x], lambda: l2norm(x))


def gated_rms_norm():
    from fla.modules.fused_norm_gate import rms_norm_gated
    x, g, w = rand(1, tokens(32768), 6, 128), rand(1, tokens(32768), 6, 128), rand(128)
    return Case([x, g, w], lambda: rms_norm_gated(x, g, w, None, eps=1e-6))


def conv():
    from fla.modules.conv.causal_conv1d import causal_conv1d
    batch, time, _ = short(8, 4096, 1)
    x, w = rand(batch, time, 1536), rand(1536, 4, scale=0.3)
    return Case([x, w], lambda: causal_conv1d(x, w, activation="silu")[0])


def swiglu():
    from fla.modules.activations import swiglu
    a, b = rand(1, tokens(32768), 1536), rand(1, tokens(32768), 1536)
    return Case([a, b], lambda: swiglu(a, b))


def linear_cross_entropy(n=32768, d=512, vocabulary=32000):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
    if Setting.tiny:
        vocabulary = 640
    x, w = rand(tokens(n), d), rand(vocabulary, d, scale=0.04)
    labels = torch.randint(vocabulary, (tokens(n),), device=Setting.device)
    return Case([x, w], lambda: fused_linear_cross_entropy_loss(x, labels, w))


def three_products(n=32768, d=512, vocabulary=32000):
    n, vocabulary = tokens(n), 640 if Setting.tiny else vocabulary
    x, w = rand(n, d, grad=False), rand(vocabulary, d, grad=False)
    logits = torch.empty(n, vocabulary, device=Setting.device, dtype=Setting.dtype)

    def products():
        torch.mm(x, w.t(), out=logits)  # then, with the gradient in the logits' place:
        return logits @ w, logits.t() @ x
    return Case(None, products, whole=True)


# The delta rule.

def delta_inputs(B, T, H, K, V):
    q, k = (unit(B, T, H, K).to(Setting.dtype).requires_grad_() for _ in range(2))
    return q, k, rand(B, T, H, V), uniform(B, T, H)  # and β


def gated_delta_rule(*shape):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    B, T, H = short(*shape[:3])
    q, k, v, beta = delta_inputs(B, T, H, *shape[3:])
    g = log_decays(B, T, H)
    return Case([q, k, v, g, beta], lambda: chunk_gated_delta_rule(q, k, v, g, beta)[0])


def kda(*shape, bounded=False):
    from fla.ops.kda import chunk_kda
    B, T, H = short(*shape[:3])
    q, k, v, beta = delta_inputs(B, T, H, *shape[3:])
    g = log_decays(B, T, H, shape[3])
    if not bounded:
        return Case([q, k, v, g, beta], lambda: chunk_kda(q, k, v, g, beta)[0])
    g = g.detach().clamp(min=-4.9).requires_grad_()
    return Case([q, k, v, g, beta],
                lambda: chunk_kda(q, k, v, g, beta, safe_gate=True, lower_bound=-5.0)[0])


def of_logits(family, *shape):
    """As models call them: q and k normalised, gates from logits, all in the operator."""
    B, T, H = short(*shape[:3])
    K, V = shape[3:]
    q, k, v, z = rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, T, H)
    A_log = uniform(H, high=2.7)
    options = {"A_log": A_log, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
               "use_beta_sigmoid_in_kernel": True}
    if family == "kda":
        from fla.ops.kda import chunk_kda as kernel
        g, bias = rand(B, T, H, K), uniform(H * K, low=-7.0, high=-2.0)
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
        g, bias = rand(B, T, H), uniform(H, low=-7.0, high=-2.0)
    return Case([q, k, v, g, z, A_log, bias],
                lambda: kernel(q, k, v, g, z, dt_bias=bias, **options)[0])


def gdn2(*shape):
    from fla.ops.gdn2 import chunk_gdn2
    B, T, H = short(*shape[:3])
    q, k, v, _ = delta_inputs(B, T, H, *shape[3:])
    g, b = log_decays(B, T, H, shape[3]), uniform(B, T, H, shape[3], dtype=Setting.dtype)
    w = uniform(B, T, H, shape[4], dtype=Setting.dtype)
    return Case([q, k, v, g, b, w], lambda: chunk_gdn2(q, k, v, g, b, w)[0])


def delta_step(family, batch, H=6, K=64, V=128):
    """One token of decoding: an f32 state that is read and written."""
    if family == "kda":
        from fla.ops.kda import fused_recurrent_kda as recurrent
    else:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recurrent
    B = 2 if Setting.tiny else batch
    q, k, v, beta = delta_inputs(B, 1, H, K, V)
    g = log_decays(B, 1, H, K) if family == "kda" else log_decays(B, 1, H)
    state = torch.randn(B, H, K, V, device=Setting.device)
    return Case(None, lambda: recurrent(q, k, v, g=g, beta=beta, initial_state=state,
                                        output_final_state=True)[0])


# The other recurrences.

def rwkv7(*shape, safe_gate=False):
    from fla.ops.rwkv7 import chunk_rwkv7
    (B, T, H), (K, V) = short(*shape[:3]), shape[3:]
    r, k, v = rand(B, T, H, K), rand(B, T, H, K, scale=K ** -0.5), rand(B, T, H, V)
    w = uniform(B, T, H, K, low=-0.6065, high=0.0, dtype=Setting.dtype)
    kk = unit(B, T, H, K)
    a = (-kk).to(Setting.dtype).requires_grad_()
    b = (kk * torch.rand_like(kk)).to(Setting.dtype).requires_grad_()
    return Case([r, w, k, v, a, b], lambda: chunk_rwkv7(r=r, w=w, k=k, v=v, a=a, b=b, scale=1.0,
                                                        safe_gate=safe_gate)[0])


def linear_attention(*shape, by_channel=False):
    (B, T, H), (K, V) = short(*shape[:3]), shape[3:]
    q, k, v = rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V)
    if by_channel:
        from fla.ops.gla import chunk_gla
        g = log_decays(B, T, H, K)
        return Case([q, k, v, g], lambda: chunk_gla(q, k, v, g, scale=K ** -0.5)[0])
    from fla.ops.simple_gla import chunk_simple_gla
    g = log_decays(B, T, H)
    return Case([q, k, v, g], lambda: chunk_simple_gla(q, k, v, g, scale=K ** -0.5)[0])


def attention(backend, *shape):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    which = SDPBackend.MATH if Setting.tiny else getattr(SDPBackend, backend)
    q, k, v = (rand(*short(*shape[:3]), shape[3]) for _ in range(3))

    def forward():
        with sdpa_kernel(which):
            o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                               v.transpose(1, 2), is_causal=True)
        return o.transpose(1, 2)
    return Case([q, k, v], forward)


def ssd(batch, time, heads, P=64, N=128):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    B, T, H = short(batch, time, heads)
    x, b, c = rand(B, T, H, P), rand(B, T, 1, N), rand(B, T, 1, N)
    dt = (torch.randn(B, T, H, device=Setting.device) - 3).to(Setting.dtype).requires_grad_()
    a = (-torch.exp(2.7 * torch.rand(H, device=Setting.device))).requires_grad_()
    d, bias = rand(H, dtype=torch.float32), rand(H, dtype=torch.float32, scale=0.1)
    return Case([x, dt, a, b, c, d, bias],
                lambda: mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=256, D=d,
                                                  dt_bias=bias, dt_softplus=True))


def ssd_step(batch, H=16, P=64, N=128):
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    B = 2 if Setting.tiny else batch
    state = torch.randn(B, H, P, N, device=Setting.device)
    x, b, c = rand(B, H, P), rand(B, 1, N), rand(B, 1, N)
    # Numbers of a head, spread over its channels by strides of 0, as Mamba-2's step does.
    dt = rand(B, H)[..., None].expand(-1, -1, P)
    a = -torch.exp(torch.randn(H, device=Setting.device))[:, None, None].expand(-1, P, N)
    d, bias = (torch.randn(H, device=Setting.device)[:, None].expand(-1, P) for _ in range(2))
    return Case(None, lambda: selective_state_update(state, x, dt, a, b, c, D=d, dt_bias=bias,
                                                     dt_softplus=True))


def state_memory_attention(q, e, c, memories, gate, base, chunk, eps=1e-6, eps_row=1e-12):
    """The definition as PyTorch operations, for torch.compile: no public kernel exists. q, c
    [B,T,N], e [B,T,P], memories [B,M,H,N,P], gate [B,T], base [B,T,H,P]."""
    def scaled(x, eps):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    T, N = q.shape[1:]
    at, run = torch.arange(T, device=q.device), torch.arange(memories.shape[1], device=q.device)
    visible = (at[None] // chunk > run[:, None])[:, None]  # [M,1,T]
    keys = torch.einsum("btn,bmhnp->bmhtp", scaled(q, eps).to(q.dtype),
                        scaled(memories, eps_row).to(q.dtype))
    logits = (keys * scaled(e, eps)[:, None, None]).sum(-1) * N ** -0.5
    # A token that sees nothing: finite logits, then no weight.
    weights = torch.softmax(logits.masked_fill(~visible, -1e30), 1) * visible
    values = torch.einsum("btn,bmhnp->bmhtp", c, memories.to(q.dtype))
    read = (weights[..., None] * values).sum(1)  # [B,H,T,P]
    return base + (gate[:, :, None, None] * read.transpose(1, 2)).to(base.dtype)


def state_memory(batch, time, heads, N, P, S):
    B, T, H = short(batch, time, heads)
    S = min(S, 16) if Setting.tiny else S
    q, e, c = rand(B, T, N), rand(B, T, P), rand(B, T, N)
    memories = rand(B, T // S, H, N, P, dtype=torch.float32, scale=0.05)
    gate, base = rand(B, T), rand(B, T, H, P)
    fn = state_memory_attention if Setting.tiny else torch.compile(state_memory_attention,
                                                                   dynamic=False)
    return Case([q, e, c, memories, gate, base], lambda: fn(q, e, c, memories, gate, base, S))


def peers():
    fla = "flash-linear-attention"
    mamba = "mamba_ssm"
    out = [
        Peer("rms_norm 32768x512", fla, lambda: rms_norm(False)),
        Peer("add_rms_norm 32768x512", fla, lambda: rms_norm(True)),
        Peer("l2_norm 32768 H8 K64", fla, l2_norm),
        Peer("gated_rms_norm 32768 H6 V128", fla, gated_rms_norm),
        Peer("causal_conv1d B8 T4096 D1536 W4", fla, conv),
        Peer("swiglu 32768x1536", fla, swiglu),
        Peer("linear_cross_entropy 32768x512 V32000", fla, linear_cross_entropy),
        Peer("linear_cross_entropy 32768x512 V32000", "cuBLAS through torch", three_products,
             "its three products"),
    ]

    def add(op, shape, letters, library, make, first="", **more):
        out.append(Peer(op + "".join(f" {a}{n}" for a, n in zip(letters, shape)), library,
                        lambda: make(*shape), like=first, **more))
        return first or out[-1].name

    first = add("gated_delta_rule", (8, 4096, 6, 64, 128), "BTHKV", fla, gated_delta_rule, parts=4)
    add("gated_delta_rule", (1, 32768, 6, 64, 128), "BTHKV", fla, gated_delta_rule, first)
    add("gated_delta_rule", (2, 8192, 16, 128, 128), "BTHKV", fla, gated_delta_rule, parts=4)
    add("gated_delta_rule", (2, 8192, 8, 256, 256), "BTHKV", fla, gated_delta_rule, parts=4)
    add("gated_delta_rule_of_logits", (8, 4096, 6, 64, 128), "BTHKV", fla,
        lambda *shape: of_logits("gdn", *shape), parts=2)
    add("kda_of_logits", (8, 4096, 6, 64, 128), "BTHKV", fla,
        lambda *shape: of_logits("kda", *shape), parts=3)
    first = add("kda", (8, 4096, 6, 64, 128), "BTHKV", fla, kda, parts=6)
    add("kda", (1, 32768, 6, 64, 128), "BTHKV", fla, kda, first)
    add("kda", (2, 8192, 16, 128, 128), "BTHKV", fla, kda, parts=6)
    add("kda", (2, 8192, 8, 256, 128), "BTHKV", fla, kda, parts=6)
    bounded = lambda *shape: kda(*shape, bounded=True)
    first = add("kda", (8, 4096, 6, 64, 128), "BTHKV", fla, bounded, parts=6,
                variant="bounded gate")
    add("kda", (1, 32768, 6, 64, 128), "BTHKV", fla, bounded, first, variant="bounded gate")
    add("gdn2", (8, 4096, 6, 64, 128), "BTHKV", fla, gdn2, parts=6)
    for family, op in (("gdn", "gated_delta_rule_step"), ("kda", "kda_step")):
        for batch in (64, 256):
            out.append(Peer(f"{op} B{batch} H6 K64 V128", fla,
                            lambda family=family, batch=batch: delta_step(family, batch)))

    safe = lambda *shape: rwkv7(*shape, safe_gate=True)
    for shape in ((8, 4096, 8, 64, 64), (2, 8192, 32, 64, 64)):
        add("dplr", shape, "BTHKV", fla, rwkv7, parts=3)
        add("dplr", shape, "BTHKV", fla, safe, variant="safe gate", parts=3)
    add("gated_linear_attention", (8, 4096, 16, 128, 64), "BTHKV", fla, linear_attention, parts=2)
    add("gated_linear_attention", (8, 4096, 6, 64, 128), "BTHKV", fla, linear_attention, parts=2)
    out.append(Peer("gated_linear_attention B8 T4096 H8 K64 V64 by channel", fla, parts=3,
                    make=lambda: linear_attention(8, 4096, 8, 64, 64, by_channel=True)))
    for backend, variant in (("CUDNN_ATTENTION", "cuDNN"), ("FLASH_ATTENTION", "FA2")):
        add("attention", (8, 4096, 8, 64), "BTHD", "torch SDPA",
            lambda *shape, backend=backend: attention(backend, *shape), variant=variant)
    for batch, time, heads in ((8, 4096, 16), (2, 8192, 64)):
        out.append(Peer(f"ssd B{batch} T{time} H{heads} P64 N128", mamba, parts=3,
                        make=lambda s=(batch, time, heads): ssd(*s)))
    for batch in (64, 256):
        out.append(Peer(f"ssd_step B{batch} H16 P64 N128", mamba,
                        lambda batch=batch: ssd_step(batch)))
    for shape in ((8, 4096, 16, 128, 64, 256), (8, 1024, 16, 64, 64, 16)):
        add("state_memory_attention", shape, "BTHNPS", "torch.compile", state_memory)
    return out
