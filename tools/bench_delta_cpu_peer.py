#!/usr/bin/env python3
"""Times the public chunked PyTorch reference of the gated delta rule on the CPU, forward and backward.

Needs PyTorch, einops and flash-linear-attention on the Python path, installed by you. Only its plain
PyTorch file is loaded (its Triton kernels need a GPU):

  pip install torch einops flash-linear-attention
  python3 tools/bench_delta_cpu_peer.py --threads 2 --json peer.json
"""
import argparse
import importlib.util
import json
import math
import pathlib
import time

import torch


def reference():
    """The module fla.ops.gated_delta_rule.naive, without importing the package around it."""
    spec = importlib.util.find_spec("fla")
    if spec is None:
        raise SystemExit("bench_delta_cpu_peer: flash-linear-attention is not installed")
    for folder in spec.submodule_search_locations:
        path = pathlib.Path(folder) / "ops" / "gated_delta_rule" / "naive.py"
        if path.exists():
            spec = importlib.util.spec_from_file_location("gdn_naive", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.naive_chunk_gated_delta_rule
    raise SystemExit("bench_delta_cpu_peer: no ops/gated_delta_rule/naive.py in that version")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [("batch", 1), ("time", 1024), ("heads", 6), ("key", 64), ("value", 128),
                          ("threads", 2), ("repeats", 20)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    run = reference()

    b, t, h, k, v = args.batch, args.time, args.heads, args.key, args.value
    q, key = (torch.nn.functional.normalize(torch.randn(b, t, h, k), dim=-1) for _ in range(2))
    value, upstream = torch.randn(b, t, h, v), torch.randn(b, t, h, v)
    g, beta = -1.5 * torch.rand(b, t, h), torch.rand(b, t, h)
    inputs = [x.requires_grad_() for x in (q, key, value, g, beta)]

    forward, both = [], []
    for _ in range(args.repeats):
        start = time.perf_counter()
        o, _ = run(q, key, value, g, beta, chunk_size=64, scale=1 / math.sqrt(k))
        middle = time.perf_counter()
        torch.autograd.grad(o, inputs, upstream)
        forward.append(middle - start)
        both.append(time.perf_counter() - start)
    result = {
        "peer": "chunked PyTorch reference of flash-linear-attention",
        "torch": torch.__version__, "threads": args.threads, "dtype": "f32",
        "shape": {"B": b, "T": t, "H": h, "K": k, "V": v},
        "forward_ms": 1e3 * min(forward), "forward_backward_ms": 1e3 * min(both),
    }
    print(json.dumps(result))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
