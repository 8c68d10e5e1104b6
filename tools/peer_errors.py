#!/usr/bin/env python3
"""Errors in bf16 of the public Triton kernels (flash-linear-attention and mamba_ssm, installed by
you) beside ours, on the same golden cases, both against f64 from the same rounded inputs.

  ebb verify GOLDENS/ops --device cuda --dtype bf16 --json ours.json
  python3 tools/peer_errors.py GOLDENS/ops ours.json [--op 'kda|gdn2'] [--filter wide]
                               [--json errors.json] [--again errors.json]

Prints both errors of every tensor and their ratio. Exit code 1 where an error of ours is above 1.5
times the peer's. Not judged, and marked so: tensors of fewer than 64 numbers, which one rounding
decides, and those whose exact values are below what either side can form (an error of the peer
above 0.5). Cases that the peer cannot run are named; each runs in a process of its own under a
time limit. One case of every operator comes before the second of any, so that a --budget of
seconds reaches all operators. Kernels take their first configuration that runs instead of the
fastest one, which changes roundings only (--tune: the fastest, which takes minutes).

The peers of gdn2 refuse b and w in f32 beside bf16: they get these in bf16, and their errors are
against the exact results of what they got. Ours are those of `ebb verify`, with b and w in f32.

The peers' errors do not change when our kernels do: --again takes those that a file of --json has
and sets ours.json beside them, in an instant and without a GPU; only cases that the file lacks, or
that failed, are run (--no-run: not even those, they are left out or stay failed). The same file may be given
to --json. docs/results/h200_peer_errors.json is such a file.
"""
import argparse
import json
import os
import pathlib
import re
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from peer_tuning import FirstThatRuns  # noqa: E402
from peer_worker import run_all  # noqa: E402

OPS = ("gated_delta_rule", "kda", "gdn2", "rwkv7", "simple_gla", "gla", "ssd")
# Inputs that stay f32 beside bf16, as in `ebb verify`.
F32 = {"gated_delta_rule": "g beta h0", "kda": "g beta h0", "gdn2": "g b w h0", "rwkv7": "w h0",
       "simple_gla": "g h0", "gla": "g h0", "ssd": "A D dt dt_bias h0"}
# Of those, what the peer wants in bf16 all the same.
ROUNDED = {"gdn2": ("b", "w")}
LIMIT = 1.5


def stays_f32(op, name):
    return name in F32[op].split() and name not in ROUNDED.get(op, ())


def load(path, device):
    """The case's parameters and its tensors (f32) of a .safetensors file."""
    import numpy as np
    import torch
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    tensors = {}
    for name, t in header.items():
        if name != "__metadata__" and t["dtype"] == "F32":
            begin, end = (8 + size + x for x in t["data_offsets"])
            tensors[name] = torch.tensor(
                np.frombuffer(data[begin:end], np.float32).reshape(t["shape"]).copy(),
                device=device)
    return json.loads(header["__metadata__"]["case"]), tensors


def call(op, case, x):
    """Output and final state of the peer, from the case's inputs by name."""
    if op == "ssd":
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
        return mamba_chunk_scan_combined(
            x["x"], x["dt"], x["A"], x["B"], x["C"], chunk_size=64, D=x.get("D"),
            dt_bias=x.get("dt_bias"), initial_states=x.get("h0"), dt_softplus=True,
            return_final_states=True)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.rwkv7 import chunk_rwkv7
    from fla.ops.simple_gla import chunk_simple_gla
    order, kernel = {"gated_delta_rule": ("q k v g beta", chunk_gated_delta_rule),
                     "kda": ("q k v g beta", chunk_kda),
                     "gdn2": ("q k v g b w", chunk_gdn2),
                     "rwkv7": ("r w k v a b", chunk_rwkv7),
                     "simple_gla": ("q k v g", chunk_simple_gla),
                     "gla": ("q k v g", chunk_gla)}[op]
    return kernel(**{name: x[name] for name in order.split()}, scale=case["scale"],
                  initial_state=x.get("h0"), output_final_state=True)


def run_peer(op, case, tensors, dtype):
    """Outputs and gradients of the peer by the golden files' names."""
    import torch
    inputs = {name[3:]: (t if stays_f32(op, name[3:]) else t.to(dtype)).requires_grad_()
              for name, t in tensors.items() if name.startswith("in.")}
    first, ht = call(op, case, inputs)
    outputs = {"out.y" if op == "ssd" else "out.o": first, "out.ht": ht}
    wanted = {k: y for k, y in outputs.items() if "d" + k in tensors}
    dys = [tensors["d" + k].to(dtype).to(y.dtype) for k, y in wanted.items()]
    grads = torch.autograd.grad(list(wanted.values()), list(inputs.values()), dys,
                                allow_unused=True)
    return {**outputs, **{f"grad.{k}": g for k, g in zip(inputs, grads) if g is not None}}


def exact(op, case, tensors, dtype):
    """The same from the peer's inputs and upstream gradients, in f64 on the CPU."""
    import peer_reference
    import torch

    def rounded(t, to):
        return t.cpu().to(to).double()
    inputs = {name[3:]: rounded(t, torch.float32 if stays_f32(op, name[3:]) else dtype)
              .requires_grad_() for name, t in tensors.items() if name.startswith("in.")}
    upstream = {name[1:]: rounded(t, dtype) for name, t in tensors.items()
                if name.startswith("dout.")}
    return peer_reference.run(op, case.get("scale"), inputs, upstream)


def relative(x, want):
    return ((x.double().cpu() - want.double().cpu()).norm() / want.double().norm()).item()


def check_reference(op, case, tensors):
    """Without rounding the reference gives what the file says."""
    import torch
    for name, value in exact(op, case, tensors, torch.float32).items():
        want = tensors.get(name)
        if want is not None and want.norm() and relative(value, want) > 1e-6:
            raise ValueError(f"the reference is not that of the file: {name}")


def run_case(task, report):
    """task: (op, path, how). Reports the peer's error of every tensor."""
    op, path, how = task
    if how == "dry":  # for a machine without a GPU: interpreted, in f32
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ["FLA_CACHE_RESULTS"] = "0"  # others may run beside: no timing to be kept
    import torch
    if how != "tune":
        FirstThatRuns.set_up()
    device, dtype = ("cpu", torch.float32) if how == "dry" else ("cuda", torch.bfloat16)
    import fla.ops.common.chunk_o as chunk_o  # some versions refuse to run on Hopper; see
    chunk_o.TRITON_ABOVE_3_7_1 = True         # bench_peers.py --time-refused
    case, tensors = load(path, device)
    check_reference(op, case, tensors)
    want, errors = exact(op, case, tensors, dtype), {}
    for name, value in run_peer(op, case, tensors, dtype).items():
        if name in tensors and value is not None and want[name].norm():
            errors[name] = {"peer": relative(value, want[name]), "count": value.numel()}
    report({"errors": errors})
    if device == "cuda":
        report({"gpu": torch.cuda.get_device_name()})


def judge(name, errors, ours):
    for key, e in errors.items():
        mine = ours.get(key)
        if mine is None:
            continue
        peer = e["peer"]
        yield {"case": name, "tensor": key, "ebb": mine, "peer": peer,
               "ratio": mine / peer if peer else float("inf"), "count": e["count"],
               "judged": e["count"] >= 64 and peer < 0.5}


def in_turn(tasks):
    """The first case of every operator, then the second of every operator, and so on."""
    seen, places = {}, []
    for task in tasks:
        seen[task[0]] = seen.get(task[0], -1) + 1
        places.append(seen[task[0]])
    return [task for _, task in sorted(zip(places, tasks), key=lambda x: x[0])]


def measured_before(path):
    """The file's peers: case -> tensor -> error and count; and the file."""
    with open(path) as f:
        file = json.load(f)
    cases = {}
    for row in file["rows"]:
        # Files of the first version lack the count: whether it was enough is known.
        count = row.get("count", 64 if row["judged"] or row["peer"] >= 0.5 else 1)
        cases.setdefault(row["case"], {})[row["tensor"]] = {"peer": row["peer"], "count": count}
    return cases, file


def versions():
    from importlib import metadata
    found = {}
    for package in ("torch", "triton", "fla-core", "mamba-ssm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return found


class Table:
    """What is known of all cases, printed and written as it comes."""

    def __init__(self, args, ours):
        self.path, self.ours, self.rows, self.failed = args.json, ours, [], {}
        self.header = {"gpu": "none"}

    def add(self, name, result):
        if "error" in result:
            self.failed[name] = result["error"]
            print(f"{name:32} the peer: {result['error']}", flush=True)
        for row in judge(name, result.get("errors", {}), self.ours[name]):
            self.rows.append(row)
            print(f"{name:32} {row['tensor']:12} ebb {row['ebb']:.2e}  peer {row['peer']:.2e}  "
                  f"ratio {row['ratio']:.2f}" + ("" if row["judged"] else "  (not judged)"),
                  flush=True)

    def write(self):
        if not self.path:
            return
        self.rows.sort(key=lambda r: (r["case"], r["tensor"]))
        with open(self.path + ".part", "w") as f:
            json.dump({**self.header, "limit": LIMIT, "peer_failed": dict(sorted(
                self.failed.items())), "rows": self.rows}, f, indent=1)
            f.write("\n")
        os.replace(self.path + ".part", self.path)


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("goldens", type=pathlib.Path, help="folder of operators")
    p.add_argument("ours", help="JSON written by `ebb verify --json`")
    p.add_argument("--op", default="", help="operators whose name contains this expression")
    p.add_argument("--filter", default="", help="cases whose name contains this expression")
    p.add_argument("--processes", type=int, default=8, help="cases at once (default 8)")
    p.add_argument("--limit", type=float, default=240, help="seconds per case (default 240)")
    p.add_argument("--budget", type=float, help="seconds for everything: later cases are left out")
    p.add_argument("--tune", action="store_true", help="let Triton pick the fastest configurations")
    p.add_argument("--dry-run", action="store_true",
                   help="the peer in f32 on the CPU, interpreted: are the calls right?")
    p.add_argument("--json", help="results, rewritten after every case")
    p.add_argument("--again", metavar="FILE", help="take the peers' errors of an earlier --json")
    p.add_argument("--no-run", action="store_true", help="with --again: run no peer at all")
    args = p.parse_args()
    if args.no_run and not args.again:
        p.error("--no-run needs --again")
    return args


def main():
    args = options()
    with open(args.ours) as f:
        verified = json.load(f)
    ours = {i["name"]: {t["name"]: t["error"] for t in i["tensors"]}
            for i in verified["items"] if "tensors" in i}
    how = "dry" if args.dry_run else "tune" if args.tune else "first"
    tasks = [(op, path, how) for op in OPS if re.search(args.op, op)
             for path in sorted((args.goldens / op).glob("*.safetensors"))
             if re.search(args.filter, path.stem) and f"{op}/{path.stem}" in ours]
    if not tasks:
        sys.exit(f"peer_errors: no case of {args.goldens} fits --op '{args.op}' --filter "
                 f"'{args.filter}' and is in {args.ours}")
    table = Table(args, ours)
    before = {}
    if args.again:
        before, file = measured_before(args.again)
        if args.no_run:
            tasks = [(op, path, h) for op, path, h in tasks
                     if f"{op}/{path.stem}" in {**before, **file["peer_failed"]}]
        how = file.get("configurations", how)
        table.header = {k: v for k, v in file.items() if k not in ("limit", "peer_failed", "rows")}
    table.header.update(configurations=how, commit=verified.get("commit", "unknown"))
    waiting = []
    for task in in_turn(tasks):
        name = f"{task[0]}/{task[1].stem}"
        if name in before and name not in file["peer_failed"]:
            table.add(name, {"errors": before[name]})
        elif args.no_run:
            table.add(name, {"error": file["peer_failed"][name]})
        else:
            waiting.append(task)
    table.write()
    for (op, path, _), result in run_all(waiting, run_case, processes=args.processes,
                                         limit=args.limit, budget=args.budget):
        table.header.update({"gpu": result["gpu"], **versions()} if "gpu" in result else {})
        table.add(f"{op}/{path.stem}", result)
        table.write()
    rows, failed = table.rows, table.failed
    for op in OPS:
        judged = [r for r in rows if r["judged"] and r["case"].startswith(op + "/")]
        if judged:
            worst = max(judged, key=lambda r: r["ratio"])
            print(f"{op:18} {len(judged):3} tensors, worst ratio {worst['ratio']:.2f} "
                  f"({worst['case']} {worst['tensor']})")
    if not any(r["judged"] for r in rows):
        sys.exit("peer_errors: nothing to judge")
    above = [r for r in rows if r["judged"] and r["ratio"] > LIMIT]
    print(f"{len(above)} above {LIMIT}; the peer failed in {len(failed)} of {len(tasks)} cases")
    sys.exit(len(above) > 0)


if __name__ == "__main__":
    main()
