#!/usr/bin/env python3
"""Times the public kernels that rows of `ebb bench ops` are compared with, on the same GPU and
shapes: as users run them and replayed as a CUDA graph, with the memory that a forward and backward
pass takes beyond its inputs. Ratios where `ebb bench ops --json` is given.

  pip install flash-linear-attention        # and mamba_ssm; torch with a GPU
  python3 tools/bench_peers.py --list
  python3 tools/bench_peers.py --warm 16 --filter 'kda|gdn2'      # compiles only, in parallel
  python3 tools/bench_peers.py --filter 'kda|gdn2' --json peers.json --merge bench.json
  python3 tools/bench_peers.py --compare --json peers.json --merge bench.json

Every row runs in a child process under a time limit: one that crashes or never ends costs its own
figures only. FILE of --json is rewritten after every row; rows that it has already and that are not
measured again stay in it.
"""
import argparse
import contextlib
import gc
import json
import os
import pathlib
import re
import signal
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from peer_tuning import CompileOnly, shorter_tuning  # noqa: E402
from peer_worker import first_line, run_all  # noqa: E402

KEYS = ("fwd_graph_ms", "fwd_bwd_graph_ms", "extra_bytes")


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--filter", default="", help="regular expression that a row's name contains")
    p.add_argument("--json", help="results, rewritten after every row")
    p.add_argument("--merge", action="append", default=[], metavar="FILE",
                   help="JSON of `ebb bench ops --json`; may be given several times")
    p.add_argument("--limit", type=float, default=240, help="seconds per row (default 240)")
    p.add_argument("--budget", type=float, help="seconds for everything: later rows are left out")
    p.add_argument("--missing", action="store_true",
                   help="only rows that FILE of --json does not have yet, or has with an error")
    p.add_argument("--time-refused", action="store_true",
                   help="also time the gated backward kernel that the library refuses to run with "
                   "some\nTriton versions on Hopper (its results are wrong there; only its speed "
                   "is of interest)")
    mode = p.add_mutually_exclusive_group()
    mode.add_argument("--list", action="store_true", help="rows and peers; runs nothing")
    mode.add_argument("--warm", type=int, metavar="N",
                      help="measure nothing: fill the compilers' caches with N processes at once")
    mode.add_argument("--compare", action="store_true",
                      help="measure nothing: print FILE of --json beside --merge")
    mode.add_argument("--dry-run", action="store_true",
                      help="measure nothing: every call once on the CPU, with short inputs and the "
                      "kernels interpreted")
    args = p.parse_args()
    if (args.compare or args.missing) and not args.json:
        p.error("--compare and --missing need --json")
    return args


def read_rows(path):
    if not path or not os.path.exists(path):
        return []
    with open(path) as f:
        return json.load(f)["results"]


def write(path, rows):
    if not path:
        return
    header = {}
    for row in rows:  # known to the children: this process leaves the GPU alone
        header.update(row.get("made_with", {}))
    clean = [{k: v for k, v in row.items() if k != "made_with"} for row in rows]
    if os.path.exists(path):
        with open(path) as f:
            header = {**{k: v for k, v in json.load(f).items() if k != "results"}, **header}
    with open(path + ".part", "w") as f:
        json.dump({**header, "results": clean}, f, indent=1)
    os.replace(path + ".part", path)


def our_rows(paths):
    """name of a bench row -> the figures that KEYS name."""
    ours = {}
    for path in paths:
        with open(path) as f:
            rows = json.load(f)["rows"]
        for row in rows:
            if "forward" not in row:  # it failed there
                continue
            fwd, bwd = row["forward"]["ms"], (row.get("backward") or {}).get("ms", 0)
            mine = {"fwd_graph_ms": fwd, "fwd_bwd_graph_ms": fwd + bwd}
            if "memory" in row:  # beyond inputs and upstream gradients, as measure() counts
                mine["extra_bytes"] = row["memory"]["peak_bytes"] - row["memory"]["given_bytes"]
            ours[f"{row['op']} {row['shape']}"] = mine
    return ours


def add_ratios(row, ours):
    mine = ours.get(row.get("row", row["name"]), {})
    for key in KEYS:
        if key in row and key in mine:
            row["ebb_" + key], row["ratio_" + key] = mine[key], row[key] / mine[key]


def show(row):
    line = [f"{row['name']:62}"]
    for what, title in (("fwd", "fwd"), ("fwd_bwd", "fwd+bwd")):
        eager = f"{row[f'{what}_eager_ms']:.4f}" if f"{what}_eager_ms" in row else "-"
        if f"{what}_graph_ms" in row:
            line.append(f"{title} {row[f'{what}_graph_ms']:.4f} (eager {eager}) ms")
            if f"ratio_{what}_graph_ms" in row:
                line[-1] += (f", ebb {row[f'ebb_{what}_graph_ms']:.4f}: "
                             f"x{row[f'ratio_{what}_graph_ms']:.2f}")
        elif eager != "-":
            line.append(f"{title} - (eager {eager}) ms")
    if "extra_bytes" in row:
        line.append(f"extra {row['extra_bytes'] / 1e6:.0f} MB")
        if "ratio_extra_bytes" in row:
            line[-1] += f", ebb {row['ebb_extra_bytes'] / 1e6:.0f}: x{row['ratio_extra_bytes']:.2f}"
    if "error" in row:
        line.append("ERROR " + row["error"])
    elif len(line) == 1:
        line.append(row.get("note", "ok"))
    if "seconds" in row:
        line.append(f"[{row['seconds']:.0f} s]")
    print("  ".join(line), flush=True)


# In the children.

def time_ms(fn, repeats=20):
    """Median over repeats, each a batch long enough for the clock."""
    import torch
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
    import torch
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    return time_ms(graph.replay)


def passes(case):
    """The two functions that are timed: forward alone, and both passes (or None)."""
    import torch

    def forward_only():
        with torch.no_grad():
            return case.forward()
    if case.inputs is None:
        return forward_only, None
    dys = []

    def both():
        ys = case.forward()
        ys = [y for y in (ys if isinstance(ys, tuple) else (ys,)) if y.requires_grad]
        if not dys:
            dys.extend(torch.randn_like(y) for y in ys)
        return torch.autograd.grad(ys, case.inputs, dys)
    return forward_only, both


def measure(case, report):
    """Eager times first: what cannot be captured has those at least."""
    import torch
    forward_only, both = passes(case)
    key = "fwd_bwd" if case.whole else "fwd"
    report({f"{key}_eager_ms": time_ms(forward_only)})
    if both is not None:
        both()  # tunes the kernels, which takes memory of its own
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        both()
        torch.cuda.synchronize()
        report({"extra_bytes": torch.cuda.max_memory_allocated() - base})
        report({"fwd_bwd_eager_ms": time_ms(both)})
    report({f"{key}_graph_ms": graph_ms(forward_only)})
    if both is not None:
        report({"fwd_bwd_graph_ms": graph_ms(both)})


def versions():
    import importlib.metadata as metadata
    import torch
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in ("fla-core", "mamba_ssm", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # unpacked beside, without its record
            module = sys.modules.get(name.replace("-core", ""))
            if getattr(module, "__version__", None):
                found[name] = module.__version__
    return found


def run_row(task, report):
    """task: (name, part, parts, mode)."""
    name, part, parts, mode = task
    if mode == "dry":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import peer_rows
    if mode == "dry":
        peer_rows.Setting.device, peer_rows.Setting.dtype = "cpu", torch.float32
        peer_rows.Setting.tiny = True
        torch.cuda.device = lambda device: contextlib.nullcontext()
        torch.set_num_threads(1)
    if mode == "measure":
        shorter_tuning()
    else:
        CompileOnly.set_up(0 if mode == "dry" else parts, part)
    if "refused" in os.environ.get("EBB_PEERS", ""):
        import fla.ops.common.chunk_o as chunk_o
        chunk_o.TRITON_ABOVE_3_7_1 = True
    peer = {p.name: p for p in peer_rows.peers()}[name]
    if mode == "dry":
        try:
            run_once(peer.make())
        except Exception as error:
            if type(error).__name__ != "InterpreterError":
                raise
            # The library took the arguments and has reached its kernels.
            report({"note": f"the interpreter cannot run a kernel of it: {first_line(error)}"})
        return
    # Everything on one side stream: a graph can only be captured off the default one, and autograd
    # runs each backward where its forward ran.
    with torch.cuda.stream(torch.cuda.Stream()):
        case = peer.make()
        if mode == "warm":
            run_once(case)
        else:
            report({"made_with": versions()})
            measure(case, report)
        torch.cuda.synchronize()
    del case
    gc.collect()
    torch.cuda.empty_cache()


def run_once(case):
    import torch
    forward_only, both = passes(case)
    forward_only()
    for x, g in zip(case.inputs or [], both() if both else []):
        if g.shape != x.shape or not torch.isfinite(g.float()).all():
            raise ValueError(f"gradient {list(g.shape)} of an input {list(x.shape)}, or not finite")


def main():
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the clean-up of run_all
    import peer_rows  # and torch with it, which each child need not import again
    wanted = [p for p in peer_rows.peers() if re.search(args.filter, p.name)]
    if not wanted:
        sys.exit(f"bench_peers: no row matches '{args.filter}'; --list names them")
    if args.list:
        for p in wanted:
            print(f"{p.name:62} {p.library}")
        return 0
    known, ours = {row["name"]: row for row in read_rows(args.json)}, our_rows(args.merge)
    if args.compare:
        for row in known.values():
            if re.search(args.filter, row["name"]):
                add_ratios(row, ours)
                show(row)
        write(args.json, list(known.values()))
        return 0
    if peer_rows.torch is None:
        sys.exit("bench_peers: needs PyTorch (--list and --compare do not)")
    if args.missing:
        wanted = [p for p in wanted if "error" in known.get(p.name, {"error": ""})]
    if args.time_refused:
        os.environ["EBB_PEERS"] = "refused"
    failed = 0
    if args.warm:
        names = {p.name for p in wanted}
        todo = [p for p in wanted if p.like not in names]  # others compile nothing of their own
        tasks = [(p.name, part, p.parts, "warm") for p in sorted(todo, key=lambda p: -p.parts)
                 for part in range(p.parts)]
        for task, row in run_all(tasks, run_row, processes=args.warm, limit=args.limit,
                                 budget=args.budget):
            failed += "error" in row
            show({"name": f"{task[0]} ({task[1] + 1}/{task[2]})", **row})
        return int(failed > 0)
    by_name = {p.name: p for p in wanted}
    mode = "dry" if args.dry_run else "measure"
    for task, row in run_all([(p.name, 0, 1, mode) for p in wanted], run_row, limit=args.limit,
                             budget=args.budget):
        peer = by_name[task[0]]
        row = {"name": peer.name, "row": peer.row, "peer": peer.library, **row}
        failed += "error" in row
        add_ratios(row, ours)
        show(row)
        if mode == "measure":
            if "error" not in row or "error" in known.get(peer.name, {"error": ""}):
                known[peer.name] = row
            write(args.json, list(known.values()))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
