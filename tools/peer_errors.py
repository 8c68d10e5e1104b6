#!/usr/bin/env python3
"""Errors in bf16 of the public Triton kernels (flash-linear-attention, installed by you) beside
ours, on the same golden cases and against the same exact numbers.

  ebb verify GOLDENS/ops --device cuda --dtype bf16 --json ours.json
  python3 tools/peer_errors.py GOLDENS/ops ours.json [--filter wide] [--json errors.json]

Exit code 1 where an error of ours is above 1.5 times the peer's. Tensors of fewer than 64 numbers
are printed and not judged: one rounding decides them.
"""
import argparse
import json
import pathlib
import struct
import sys

import numpy as np
import torch

DEV, DT = "cuda", torch.bfloat16


def load(path):
    """The case's parameters and its tensors (f32) of a .safetensors file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    tensors = {}
    for name, t in header.items():
        if name != "__metadata__" and t["dtype"] == "F32":
            begin, end = (8 + size + x for x in t["data_offsets"])
            tensors[name] = torch.tensor(
                np.frombuffer(data[begin:end], np.float32).reshape(t["shape"]).copy(), device=DEV)
    return json.loads(header["__metadata__"]["case"]), tensors


def run_peer(op, case, tensors):
    """Outputs and gradients of the peer by the golden files' names."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.kda import chunk_kda
    from fla.ops.rwkv7 import chunk_rwkv7
    f32 = {"g", "w", "beta", "h0"} if op == "rwkv7" else {"g", "beta", "h0"}
    inputs = {name[3:]: (t if name[3:] in f32 else t.to(DT)).requires_grad_()
              for name, t in tensors.items() if name.startswith("in.")}
    order, kernel = {"gated_delta_rule": ("q k v g beta", chunk_gated_delta_rule),
                     "kda": ("q k v g beta", chunk_kda),
                     "gdn2": ("q k v g b w", chunk_gdn2),
                     "rwkv7": ("r w k v a b", chunk_rwkv7)}[op]
    o, ht = kernel(*(inputs[name] for name in order.split()), scale=case["scale"],
                   initial_state=inputs.get("h0"), output_final_state=True)
    outputs, dys = {"out.o": o}, [tensors["dout.o"].to(o.dtype)]
    if "dout.ht" in tensors:
        outputs["out.ht"] = ht
        dys.append(tensors["dout.ht"].to(ht.dtype))
    grads = torch.autograd.grad(list(outputs.values()), list(inputs.values()), dys,
                                allow_unused=True)
    return {**outputs, **{f"grad.{k}": g for k, g in zip(inputs, grads) if g is not None}}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("goldens", type=pathlib.Path, help="folder of operators")
    p.add_argument("ours", help="JSON written by `ebb verify --json`")
    p.add_argument("--filter", default="wide", help="case names that contain this")
    p.add_argument("--json")
    args = p.parse_args()
    import fla.ops.common.chunk_o as chunk_o  # some versions refuse to run on Hopper; see
    chunk_o.TRITON_ABOVE_3_7_1 = True         # bench_peers.py --time-refused
    items = json.load(open(args.ours))["items"]
    ours = {i["name"]: {t["name"]: t["error"] for t in i["tensors"]}
            for i in items if "tensors" in i}
    rows, worst = [], 0.0
    for op in ("gated_delta_rule", "kda", "gdn2", "rwkv7"):
        for path in sorted((args.goldens / op).glob("*.safetensors")):
            name = f"{op}/{path.stem}"
            if args.filter not in path.stem or name not in ours:
                continue
            case, tensors = load(path)
            for key, value in run_peer(op, case, tensors).items():
                want = tensors.get(key)
                mine = ours[name].get(key)
                if want is None or mine is None or not want.norm():
                    continue
                peer = ((value.float() - want).norm() / want.norm()).item()
                judged = want.numel() >= 64
                ratio = mine / peer if peer else float("inf")
                worst = max(worst, ratio if judged else 0.0)
                rows.append({"case": name, "tensor": key, "ebb": mine, "peer": peer,
                             "ratio": ratio, "judged": judged})
                print(f"{name:28} {key:12} ebb {mine:.2e}  peer {peer:.2e}  ratio {ratio:.2f}"
                      + ("" if judged else "  (few numbers)"), flush=True)
    if not rows:
        sys.exit(f"peer_errors: no case of {args.goldens} contains '{args.filter}' and is in "
                 f"{args.ours}")
    print(f"worst ratio {worst:.2f} over {len(rows)} tensors")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"gpu": torch.cuda.get_device_name(), "worst_ratio": worst, "rows": rows}, f,
                      indent=1)
    sys.exit(worst > 1.5)


if __name__ == "__main__":
    main()
