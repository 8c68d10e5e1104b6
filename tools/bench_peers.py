#!/usr/bin/env python3
"""Times the public Triton kernels (flash-linear-attention, installed by you), or torch.compile
where there is none, on the shapes of `ebb bench ops`, on the same GPU, as users run them and
replayed as a CUDA graph.

  pip install flash-linear-attention
  python3 tools/bench_peers.py --json peers.json [--filter rms] [--merge ebb.json]

--merge reads the JSON of `ebb bench ops` and prints ebb / peer ratios beside each other.
"""
import argparse
import json
import re
import statistics

import torch

DEV, DT = "cuda", torch.bfloat16


def rand(*shape, dtype=DT, scale=1.0, grad=True):
    return (torch.randn(*shape, device=DEV) * scale).to(dtype).requires_grad_(grad)


def time_ms(fn, repeats=20):
    """Median over repeats, each a batch long enough for the clock."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(5):
            fn()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 5)
    return statistics.median(times)


def graph_ms(fn):
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    return time_ms(graph.replay)


def cases():
    """name -> (inputs, forward); names equal those of `ebb bench ops`."""
    import torch.nn.functional as F
    from fla.modules.activations import swiglu
    from fla.modules.conv.causal_conv1d import causal_conv1d
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.modules.l2norm import l2norm
    from fla.modules.layernorm import rms_norm
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.rwkv7 import chunk_rwkv7
    from fla.ops.simple_gla import chunk_simple_gla

    n = 32768
    x, w = rand(1, n, 512), rand(512)
    yield "rms_norm 32768x512", [x, w], lambda: rms_norm(x, w, None, eps=1e-6)
    r, x2 = rand(1, n, 512), rand(1, n, 512)
    yield ("add_rms_norm 32768x512", [x2, r, w],
           lambda: rms_norm(x2, w, None, residual=r, eps=1e-6, prenorm=True))
    h = rand(1, n, 8, 64)
    yield "l2_norm 32768 H8 K64", [h], lambda: l2norm(h)
    o, g, wv = rand(1, n, 6, 128), rand(1, n, 6, 128), rand(128)
    yield ("gated_rms_norm 32768 H6 V128", [o, g, wv],
           lambda: rms_norm_gated(o, g, wv, None, eps=1e-6))
    c, wc = rand(8, 4096, 1536), rand(1536, 4, scale=0.3)
    yield ("causal_conv1d B8 T4096 D1536 W4", [c, wc],
           lambda: causal_conv1d(c, wc, activation="silu")[0])
    a, b = rand(1, n, 1536), rand(1, n, 1536)
    yield "swiglu 32768x1536", [a, b], lambda: swiglu(a, b)

    def delta(B, T, H, K, V):
        q = F.normalize(torch.randn(B, T, H, K, device=DEV), dim=-1).to(DT).requires_grad_()
        k = F.normalize(torch.randn(B, T, H, K, device=DEV), dim=-1).to(DT).requires_grad_()
        v = rand(B, T, H, V)
        gate = F.logsigmoid(torch.randn(B, T, H, device=DEV)).requires_grad_()
        beta = torch.rand(B, T, H, device=DEV).requires_grad_()
        return [q, k, v, gate, beta], lambda: chunk_gated_delta_rule(q, k, v, gate, beta)[0]

    for shape in [(8, 4096, 6, 64, 128), (1, 32768, 6, 64, 128), (2, 8192, 16, 128, 128)]:
        inputs, fn = delta(*shape)
        yield "gated_delta_rule B{} T{} H{} K{} V{}".format(*shape), inputs, fn

    def channel(kind, B, T, H, K, V):
        (q, k, v, _, beta), _ = delta(B, T, H, K, V)
        gate = F.logsigmoid(torch.randn(B, T, H, K, device=DEV)).requires_grad_()
        if kind == "kda":
            return [q, k, v, gate, beta], lambda: chunk_kda(q, k, v, gate, beta)[0]
        b = torch.rand(B, T, H, K, device=DEV).to(DT).requires_grad_()
        w = torch.rand(B, T, H, V, device=DEV).to(DT).requires_grad_()
        return [q, k, v, gate, b, w], lambda: chunk_gdn2(q, k, v, gate, b, w)[0]

    for kind, *shape in [("kda", 8, 4096, 6, 64, 128), ("kda", 1, 32768, 6, 64, 128),
                         ("gdn2", 8, 4096, 6, 64, 128)]:
        inputs, fn = channel(kind, *shape)
        yield "{} B{} T{} H{} K{} V{}".format(kind, *shape), inputs, fn

    def rwkv7(B, T, H, K, V):
        r, k, v = rand(B, T, H, K), rand(B, T, H, K, scale=K ** -0.5), rand(B, T, H, V)
        w = (-0.6065 * torch.rand(B, T, H, K, device=DEV)).to(DT).requires_grad_()
        kk = F.normalize(torch.randn(B, T, H, K, device=DEV), dim=-1)
        a = (-kk).to(DT).requires_grad_()
        b = (kk * torch.rand(B, T, H, K, device=DEV)).to(DT).requires_grad_()
        return [r, w, k, v, a, b], lambda: chunk_rwkv7(r=r, w=w, k=k, v=v, a=a, b=b, scale=1.0)[0]

    for shape in [(8, 4096, 8, 64, 64), (2, 8192, 32, 64, 64)]:
        inputs, fn = rwkv7(*shape)
        yield "dplr B{} T{} H{} K{} V{}".format(*shape), inputs, fn

    # One token of decoding: no backward pass, an f32 state that is read and written.
    def step(recurrent, B, H, K, V, gates):
        (q, k, v, _, beta), _ = delta(B, 1, H, K, V)
        gate = F.logsigmoid(torch.randn(B, 1, H, *gates, device=DEV))
        state = torch.randn(B, H, K, V, device=DEV)
        return lambda: recurrent(q, k, v, g=gate, beta=beta, initial_state=state,
                                 output_final_state=True)[0]

    for batch in (64, 256):
        shape = f"B{batch} H6 K64 V128"
        yield (f"gated_delta_rule_step {shape}", None,
               step(fused_recurrent_gated_delta_rule, batch, 6, 64, 128, ()))
        yield f"kda_step {shape}", None, step(fused_recurrent_kda, batch, 6, 64, 128, (64,))

    B, T, H, K, V = 8, 4096, 6, 64, 128
    q, k, v = rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V)
    gate = F.logsigmoid(torch.randn(B, T, H, device=DEV)).requires_grad_()
    yield (f"gated_linear_attention B{B} T{T} H{H} K{K} V{V}", [q, k, v, gate],
           lambda: chunk_simple_gla(q, k, v, gate, scale=K ** -0.5)[0])
    yield from ssd_cases()
    yield from sma_cases()


def state_memory_attention(q, e, c, memories, gate, base, chunk, eps=1e-6, eps_row=1e-12):
    """The definition as PyTorch operations, for torch.compile: no public kernel exists. q, c
    [B,T,N], e [B,T,P], memories [B,M,H,N,P], gate [B,T], base [B,T,H,P]."""
    def unit(x, eps):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    B, T, N = q.shape
    runs = memories.shape[1]
    tokens, run = torch.arange(T, device=q.device), torch.arange(runs, device=q.device)
    visible = (tokens[None] // chunk > run[:, None])[:, None]  # [M,1,T]
    keys = torch.einsum("btn,bmhnp->bmhtp", unit(q, eps).to(DT), unit(memories, eps_row).to(DT))
    logits = (keys * unit(e, eps)[:, None, None]).sum(-1) * N ** -0.5
    # A token that sees nothing: finite logits, then no weight.
    weights = torch.softmax(logits.masked_fill(~visible, -1e30), 1) * visible
    values = torch.einsum("btn,bmhnp->bmhtp", c, memories.to(DT))
    read = (weights[..., None] * values).sum(1)  # [B,H,T,P]
    return base + (gate[:, :, None, None] * read.transpose(1, 2)).to(DT)


def sma_cases():
    compiled = torch.compile(state_memory_attention, dynamic=False)
    for B, T, H, N, P, S in [(8, 4096, 16, 128, 64, 256), (8, 1024, 16, 64, 64, 16)]:
        q, e, c = rand(B, T, N), rand(B, T, P), rand(B, T, N)
        memories = rand(B, T // S, H, N, P, dtype=torch.float32, scale=0.05)
        gate, base = rand(B, T), rand(B, T, H, P)

        def fn(q=q, e=e, c=c, memories=memories, gate=gate, base=base, S=S):
            return compiled(q, e, c, memories, gate, base, S)

        yield (f"state_memory_attention B{B} T{T} H{H} N{N} P{P} S{S}",
               [q, e, c, memories, gate, base], fn)


def ssd_cases():
    """mamba_ssm's kernels, where that package is installed (only its Triton part is needed)."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        print(f"mamba_ssm: {error}; its rows are left out")
        return
    P, N = 64, 128
    for B, T, H in [(8, 4096, 16), (2, 8192, 64)]:
        x, b, c = rand(B, T, H, P), rand(B, T, 1, N), rand(B, T, 1, N)
        dt = (torch.randn(B, T, H, device=DEV) - 3).to(DT).requires_grad_()
        a = (-torch.exp(2.7 * torch.rand(H, device=DEV))).requires_grad_()
        d, bias = rand(H, dtype=torch.float32), rand(H, dtype=torch.float32, scale=0.1)

        def fn(x=x, dt=dt, a=a, b=b, c=c, d=d, bias=bias):
            return mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=256, D=d, dt_bias=bias,
                                             dt_softplus=True)

        yield f"ssd B{B} T{T} H{H} P{P} N{N}", [x, dt, a, b, c, d, bias], fn

    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    H = 16
    for B in (64, 256):
        state, x, dt = torch.randn(B, H, P, N, device=DEV), rand(B, H, P), rand(B, H)
        b, c = rand(B, 1, N), rand(B, 1, N)
        per_head = [torch.randn(H, device=DEV) for _ in range(3)]  # log(−A), D, dt_bias

        def step(state=state, x=x, dt=dt, b=b, c=c, per_head=per_head):
            a, d, bias = per_head
            return selective_state_update(
                state, x, dt[..., None].expand(-1, -1, P), -torch.exp(a)[:, None, None].expand(
                    -1, P, N), b, c, D=d[:, None].expand(-1, P),
                dt_bias=bias[:, None].expand(-1, P), dt_softplus=True)

        yield f"ssd_step B{B} H{H} P{P} N{N}", None, step


def measure(inputs, forward):
    """inputs: None where there is no backward pass."""
    if inputs is None:
        with torch.no_grad():
            return {"fwd_eager_ms": time_ms(forward), "fwd_graph_ms": graph_ms(forward)}
    first = forward()
    outputs = first if isinstance(first, tuple) else (first,)
    dys = [torch.randn_like(y) for y in outputs if y.requires_grad]

    def forward_only():
        with torch.no_grad():
            forward()

    def both():
        ys = forward()
        ys = [y for y in (ys if isinstance(ys, tuple) else (ys,)) if y.requires_grad]
        torch.autograd.grad(ys, inputs, dys)

    both()  # tunes the kernels, which takes memory of its own
    del first, outputs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - base
    return {"fwd_eager_ms": time_ms(forward_only), "fwd_graph_ms": graph_ms(forward_only),
            "fwd_bwd_eager_ms": time_ms(both), "fwd_bwd_graph_ms": graph_ms(both),
            "extra_bytes": extra}


def main():
    # Everything on one side stream: a graph can only be captured off the default one, and autograd
    # runs each backward where its forward ran.
    with torch.cuda.stream(torch.cuda.Stream()):
        run()


def run():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--json")
    p.add_argument("--filter", default="")
    p.add_argument("--merge", help="JSON written by `ebb bench ops --json`")
    p.add_argument("--time-refused", action="store_true",
                   help="also time the gated backward kernel that the library refuses to run with "
                   "some Triton versions on Hopper (its results are wrong there; only its speed "
                   "is of interest)")
    args = p.parse_args()
    if args.time_refused:
        import fla.ops.common.chunk_o as chunk_o
        chunk_o.TRITON_ABOVE_3_7_1 = True
    ours = {}
    if args.merge:
        with open(args.merge) as f:
            for row in json.load(f)["rows"]:
                if "forward" not in row:  # it failed there
                    continue
                fwd, bwd = row["forward"]["ms"], (row.get("backward") or {}).get("ms", 0)
                mine = {"fwd_graph_ms": fwd, "fwd_bwd_graph_ms": fwd + bwd}
                if "memory" in row:  # beyond inputs and upstream gradients, as measure() counts
                    m = row["memory"]
                    mine["extra_bytes"] = m["peak_bytes"] - m["given_bytes"]
                ours[f"{row['op']} {row['shape']}"] = mine
    rows = []
    for name, inputs, forward in [c for c in cases() if re.search(args.filter, c[0])]:
        try:
            row = {"name": name, **measure(inputs, forward)}
        except Exception as error:  # a peer that refuses to run is a result too
            row = {"name": name, "error": str(error).splitlines()[0][:200]}
        mine = ours.get(name, {})
        for key in ("fwd_graph_ms", "fwd_bwd_graph_ms", "extra_bytes"):
            if key in row and key in mine:
                row["ebb_" + key], row["ratio_" + key] = mine[key], row[key] / mine[key]
        rows.append(row)
        print("  ".join(f"{k}={v:.4f}" if isinstance(v, float) else f"{k}={v}"
                        for k, v in row.items()), flush=True)
        write(args.json, rows)


def write(path, rows):
    """After every row, so that what a time limit cuts off costs nothing else."""
    if not path:
        return
    import fla
    with open(path, "w") as f:
        json.dump({"gpu": torch.cuda.get_device_name(), "peer": f"flash-linear-attention "
                   f"{fla.__version__}", "torch": torch.__version__, "results": rows}, f, indent=1)


if __name__ == "__main__":
    main()
