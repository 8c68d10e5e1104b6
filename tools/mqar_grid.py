#!/usr/bin/env python3
"""Associative recall over a grid: DART and Mamba-2 by length, width and state size, beside a
Transformer of each width, each learning rate of a sweep a run of its own, several runs side by side
on one GPU or CPU.

    tools/mqar_grid.py --out runs/mqar                          the whole grid, to be left alone
    tools/mqar_grid.py --out runs/mqar --budget 400             the most telling runs of 400 seconds
    tools/mqar_grid.py --out runs/mqar --table                  what is there so far, trains nothing
    tools/mqar_grid.py --out /tmp/g --device cpu --lengths 32 --widths 32 --vocab-size 64 \\
        --examples 2048 --epochs 2 --batch 32 --chunk 4         minutes on a laptop

The same command again goes on: runs that are in the results are skipped, broken-off ones resume from
their checkpoint. --results FILE holds everything (by default OUT/results.json) and is all that has
to be kept from one machine to the next. The rate of a cell is chosen by accuracy on validation
examples; the accuracy shown is that on others. Needs nothing but Python and the ebb binary.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VARIANTS = ("mamba2", "dart", "dart-unshared", "transformer")


class Run(dict):
    """model, length, width, state (0: none), lr, seed: what makes one training run."""

    @property
    def name(self):
        state = "-N{state}" if self["state"] else ""
        return ("{model}-L{length}-d{width}" + state + "-lr{lr:g}-s{seed}").format(**self)

    @property
    def cell(self):
        return (self["model"], self["length"], self["width"], self["state"])


def numbers(kind):
    return lambda text: [kind(x) for x in text.split(",") if x]


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--out", required=True, type=pathlib.Path, help="folder of runs and results")
    p.add_argument("--results", type=pathlib.Path, help="default: OUT/results.json")
    p.add_argument("--ebb", help="the binary; default: build/ebb or build-cpu/ebb, else the PATH's")
    p.add_argument("--device", default="auto", help="as for ebb train")
    p.add_argument("--jobs", type=int, default=0, help="runs side by side; 0: two cores each, up to 8, on a GPU 4")
    p.add_argument("--budget", type=float, default=0, help="seconds; running ones are then broken off")
    p.add_argument("--table", action="store_true", help="only print what the results hold")
    p.add_argument("--dry-run", action="store_true", help="only list what would be run, in order")
    p.add_argument("--list", type=pathlib.Path, metavar="FILE",
                   help="only these runs of the grid, in this order: names as --dry-run prints them")
    grid = p.add_argument_group("the grid")
    grid.add_argument("--lengths", type=numbers(int), default=[256, 512])
    grid.add_argument("--widths", type=numbers(int), default=[32, 64, 128])
    grid.add_argument("--states", type=numbers(int), default=[16, 64], help="N")
    grid.add_argument("--models", type=numbers(str), default=list(VARIANTS),
                      help="of mamba2, dart, dart-unshared (smallest N only: memories read with a "
                      "vector of their own), transformer (keys and values of every token, no N)")
    grid.add_argument("--lrs", type=numbers(float), default=[1e-3, 10**-2.5, 1e-2])
    grid.add_argument("--seed", type=int, default=42)
    size = p.add_argument_group("size of a run (the papers': 262144 examples, 8 epochs, batches of "
                                "1024 at length 256)")
    size.add_argument("--examples", type=int, default=32768, help="of each number of pairs")
    size.add_argument("--epochs", type=int, default=4)
    size.add_argument("--batch", type=int, default=128, help="sequences of a step")
    size.add_argument("--test-examples", type=int, default=1000)
    size.add_argument("--dtype", choices=["f32", "bf16"],
                      help="of activations in training; default: bf16 on a GPU (scores are f32)")
    size.add_argument("--vocab-size", type=int, default=8192)
    size.add_argument("--chunk", type=int, default=16, help="S, tokens of a memory")
    size.add_argument("--order", choices=["listed", "mixed"], default="listed",
                      help="few pairs first, or mixed")
    a = p.parse_args()
    if bad := [m for m in a.models if m not in VARIANTS]:
        p.error(f"--models: {bad[0]} is none of {', '.join(VARIANTS)}")
    for name in ("lengths", "widths", "states", "models", "lrs"):
        if not getattr(a, name):
            p.error(f"--{name} is empty")
    if any(x < 32 or x % 32 for x in a.lengths):
        p.error("--lengths: want multiples of 32")
    if any(x < 32 or x % 32 for x in a.widths):
        p.error("--widths: want multiples of 32, heads have 64 channels")
    for name in ("examples", "epochs", "batch", "test_examples", "chunk"):
        if getattr(a, name) < 1:
            p.error(f"--{name.replace('_', '-')}: want at least 1")
    if a.examples < a.batch:
        p.error(f"--examples {a.examples} are too few for one batch of {a.batch}")
    a.results = a.results or a.out / "results.json"
    a.gpu = a.device.startswith("cuda") or (a.device == "auto" and shutil.which("nvidia-smi"))
    a.dtype = a.dtype or ("bf16" if a.gpu else "f32")
    return a


def settings(a):
    """What results must have in common to stand in one table."""
    return {"examples_per_segment": a.examples, "epochs": a.epochs, "batch": a.batch,
            "segments": "pairs = length/32, /16, /8, /4, " + a.order,
            "test_examples": a.test_examples, "vocab_size": a.vocab_size, "chunk": a.chunk,
            "dtype": a.dtype}


def pairs_of(length):
    return [length // 32, length // 16, length // 8, length // 4]


def all_runs(a):
    """Most telling first: the middle rate before the sweep, short before long, DART beside Mamba-2
    with the small state before the Transformer, the ablation and the large one, the middle width
    first."""
    middle = sorted(a.lrs)[len(a.lrs) // 2]
    widths = sorted(a.widths, key=lambda w: (abs(w - 64), -w))
    runs = []
    for rates in ([middle], [x for x in a.lrs if x != middle]):
        for length in sorted(a.lengths):
            for models, states in ((("dart", "mamba2"), sorted(a.states)[:1]),
                                   (("transformer",), [0]),
                                   (("dart-unshared",), sorted(a.states)[:1]),
                                   (("dart", "mamba2"), sorted(a.states)[1:])):
                for state in states:
                    for width in widths:
                        for lr in rates:
                            for model in models:
                                if model in a.models:
                                    runs.append(Run(model=model, length=length, width=width,
                                                    state=state, lr=lr, seed=a.seed))
    return listed(runs, a.list) if a.list else runs


def listed(runs, path):
    known = {r.name: r for r in runs}
    names = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    if bad := [n for n in names if n not in known]:
        sys.exit(f"mqar_grid: {path}: {bad[0]} is no run of this grid")
    return [known[n] for n in names]


class Results:
    """The file, rewritten whole after every run."""

    def __init__(self, path, a):
        self.path, self.lock, self.data = path, threading.Lock(), {"settings": settings(a), "runs": {}}
        if path.exists():
            self.data = json.loads(path.read_text())
            other = {k: v for k, v in settings(a).items() if self.data["settings"].get(k) != v}
            if other:
                was = {k: self.data["settings"].get(k) for k in other}
                sys.exit(f"mqar_grid: {path} was made with {was}, now {other}; give another --results")

    def __contains__(self, run):
        return run.name in self.data["runs"]

    def add(self, run, record):
        with self.lock:
            self.data["runs"][run.name] = record
            self.write()

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(part, self.path)


def find_ebb(given):
    for path in [given] if given else [ROOT / "build/ebb", ROOT / "build-cpu/ebb", "ebb"]:
        if found := shutil.which(str(path)):
            return found
    sys.exit(f"mqar_grid: there is no program {given or 'build/ebb'}; --ebb names it")


def recipe_of(run, a, folder):
    kind = run["model"].split("-")[0]
    recipe = json.loads((ROOT / f"recipes/mqar/{kind}-256.json").read_text())
    steps = a.epochs * 4 * (a.examples // a.batch)
    recipe.update(comment=f"tools/mqar_grid.py: {run.name}", steps=steps, sequences=a.batch,
                  length=run["length"], dtype=a.dtype, seed=run["seed"], init={"seed": run["seed"]},
                  log_every=max(1, steps // 50), checkpoint_every=0, keep_last=1, validate_every=0,
                  out=str(folder))
    recipe["model"].update(hidden_size=run["width"], vocab_size=a.vocab_size)
    if kind == "transformer":
        recipe["model"].update(num_heads=run["width"] // 32, intermediate_size=run["width"])
    else:
        recipe["model"].update(state_size=run["state"])
    if kind == "dart":
        recipe["model"].update(sma_chunk=a.chunk, sma_shared_read=run["model"] == "dart")
    recipe["optim"]["lr"] = run["lr"]
    recipe["data"]["mqar"].update(vocab_size=a.vocab_size, pairs=pairs_of(run["length"]),
                                  test_pairs=pairs_of(run["length"])[-1:], examples=a.examples,
                                  test_examples=a.test_examples, order=a.order)
    return recipe


def expected(run, *known):
    """Seconds, from the first of lists of (run, seconds) that has runs like it; 0 if none has."""
    for times in known:
        for same in (("model", "length", "state"), ("model", "length"), ("model",)):
            like = [(r, t) for r, t in times if all(r[x] == run[x] for x in same)]
            if like:
                return statistics.median(t * run["length"] / r["length"] for r, t in like)
    return 0


class Broken(Exception):
    """The budget is used up, or somebody stopped us."""


class Grid:
    def __init__(self, a, results):
        self.a, self.results, self.ebb = a, results, find_ebb(a.ebb)
        self.cores = len(os.sched_getaffinity(0))
        self.jobs = a.jobs or max(1, min(4 if a.gpu else 8, self.cores // 2))
        self.start = time.monotonic()
        self.deadline = self.start + a.budget if a.budget else None
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.children, self.failed = set(), []
        self.before = [(r, r["seconds"]) for r in results.data["runs"].values()]
        self.times = []  # now: other work may stand beside, or another machine
        self.waiting = [r for r in all_runs(a) if r not in results]
        self.total, self.done = len(self.waiting), 0

    def left(self):
        return self.deadline - time.monotonic() if self.deadline else float("inf")

    def say(self, text):
        with self.lock:
            print(f"[{time.monotonic() - self.start:6.0f} s] {text}", flush=True)

    def call(self, arguments, log):
        """Runs ebb; when the time is up it is asked to write a checkpoint and end."""
        env = dict(os.environ, OMP_NUM_THREADS=str(max(1, self.cores // self.jobs)),
                   OMP_WAIT_POLICY="passive")
        with open(log, "ab") as out:
            child = subprocess.Popen([self.ebb, *arguments], stdout=out, stderr=out, env=env,
                                     start_new_session=True)
            with self.lock:
                self.children.add(child)
            try:
                while True:
                    try:
                        child.wait(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        if self.stop.is_set() or self.left() <= 0:
                            self.end(child)
                            raise Broken from None
            finally:
                with self.lock:
                    self.children.discard(child)
        if child.returncode:
            tail = pathlib.Path(log).read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"ebb {arguments[0]} ended with {child.returncode}: {''.join(tail)}")

    @staticmethod
    def end(child):
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def scores(self, run, folder, log, more=()):
        out = folder / "scores.json"
        pairs = ",".join(map(str, pairs_of(run["length"])))
        self.call(["mqar", "eval", "--model", str(folder), "--length", str(run["length"]), "--pairs",
                   pairs, "--vocab-size", str(self.a.vocab_size), "--examples",
                   str(self.a.test_examples), "--seed", str(run["seed"] + 1), "--device",
                   self.a.device, "--out", str(out), *more], log)
        return {s["pairs"]: s for s in json.loads(out.read_text())["scores"]}

    def train(self, run):
        folder = self.a.out / run.name
        folder.mkdir(parents=True, exist_ok=True)
        recipe = self.a.out / (run.name + ".recipe.json")
        log = self.a.out / (run.name + ".log")
        recipe.write_text(json.dumps(recipe_of(run, self.a, folder), indent=1) + "\n")
        resumed = (folder / "metrics.jsonl").exists()
        begin = time.monotonic()
        self.call(["train", str(recipe), "--resume", "--quiet", "--device", self.a.device], log)
        trained = time.monotonic() - begin
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        scores = self.scores(run, folder, log)
        record = dict(run, steps=lines[-1]["step"], loss=lines[-1]["loss"],
                      skipped=lines[-1]["skipped"], validation=lines[-1]["accuracy"],
                      parameters=next(iter(scores.values()))["parameters"],
                      accuracy={n: s["accuracy"] for n, s in scores.items()},
                      resumed=resumed, train_seconds=round(trained, 2),
                      curve=[[x["step"], x["loss"]] for x in lines])
        if run["model"] == "dart":
            off = self.scores(run, folder, log, ["--set", "use_sma=false"])
            record["accuracy_without_sma"] = {n: s["accuracy"] for n, s in off.items()}
        record["seconds"] = round(time.monotonic() - begin, 2)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        return record

    def take(self):
        """The next run that can be expected to end in time, or that no budget like this would hold:
        it goes on from its checkpoint the next time."""
        with self.lock:
            while self.waiting and not self.stop.is_set():
                run = self.waiting.pop(0)
                needed = 0.9 * expected(run, self.times, self.before)
                if self.left() > needed or self.left() > 0 and needed > self.a.budget:
                    return run
        return None

    def work(self):
        while run := self.take():
            try:
                record = self.train(run)
            except Broken:
                return
            except Exception as error:  # noqa: BLE001: the others go on
                self.failed.append(run.name)
                self.say(f"{run.name} FAILED: {error}")
                continue
            self.results.add(run, record)
            with self.lock:
                self.done += 1
                self.times.append((run, record["seconds"]))
            right = list(record["accuracy"].values())[-1]
            self.say(f"{self.done}/{self.total} {run.name}: {100 * right:.1f} %, "
                     f"{record['seconds']:.0f} s")

    def __call__(self):
        version = subprocess.run([self.ebb, "--version"], capture_output=True, text=True, check=False)
        sessions = self.results.data.setdefault("sessions", [])
        session = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "ebb": version.stdout.splitlines()[0],
                   "device": self.a.device, "jobs": self.jobs, "cores": self.cores}
        sessions.append(session)
        self.say(f"{self.total} runs to do, {self.jobs} side by side, {self.cores} cores")
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: self.stop.set())
        threads = [threading.Thread(target=self.work) for _ in range(min(self.jobs, self.total))]
        for t in threads:
            t.start()
        for t in threads:
            while t.is_alive():
                t.join(timeout=0.2)
        session.update(runs=self.done, wall_seconds=round(time.monotonic() - self.start, 1))
        self.results.write()
        self.say(f"{self.done} of {self.total} runs done, {len(self.failed)} failed")
        return 1 if self.failed else 0


def best(runs, cell):
    """The cell's run of the rate with the best validation accuracy, and how many rates ran."""
    mine = [r for r in runs if (r["model"], r["length"], r["width"], r["state"]) == cell]
    return (max(mine, key=lambda r: r["validation"]), len(mine)) if mine else (None, 0)


def percent(value):
    return f"{100 * value:.1f}"


def table(title, rows, columns, cell_of, value_of, runs, rates, show=percent):
    """Rows and columns of the best runs' values; a star where the sweep isn't through."""
    lines, any_value = [], False
    for label, row in rows:
        cells = []
        for column in columns:
            run, count = best(runs, cell_of(row, column))
            value = value_of(run, row) if run else None
            any_value |= value is not None
            cells.append("-" if value is None else
                         f"{show(value)}{'*' if count < rates else ' '}")
        lines.append(f"{label:<26}" + "".join(f"{c:>10}" for c in cells))
    if not any_value:
        return ""
    head = f"{'length x width':<26}" + "".join(f"{f'{l}x{w} ':>10}" for l, w in columns)
    return "\n".join([title, head, *lines]) + "\n"


def hardest(scores):
    return scores[max(scores, key=int)]


def tables(results, a):
    runs = list(results.data["runs"].values())
    columns = [(l, w) for l in sorted({r["length"] for r in runs})
               for w in sorted({r["width"] for r in runs})]
    states = sorted({r["state"] for r in runs if r["state"]})
    small, rates = (states or [0])[0], len(a.lrs)
    of = lambda row, column: (row[0], *column, row[1])  # noqa: E731
    accuracy = lambda run, row: hardest(run["accuracy"])  # noqa: E731
    rows = [(f"{name} N {n}", (model, n)) for n in states
            for name, model in (("DART", "dart"), ("Mamba-2", "mamba2"))]
    if any(r["model"] == "transformer" for r in runs):
        rows.append(("Transformer", ("transformer", 0)))
    if any(r["model"] == "dart-unshared" for r in runs):
        rows.append((f"DART N {small}, own read", ("dart-unshared", small)))
    text = [table("Right answers, %, length/4 pairs", rows, columns, of, accuracy, runs, rates),
            table("Their learning rates", rows, columns, of, lambda run, row: run["lr"], runs, rates,
                  lambda lr: f"{lr:.2g}")]
    rows = [(f"DART N {n}", ("dart", n, "accuracy")) for n in states[:1]] + [
        (f"DART N {n} without SMA", ("dart", n, "accuracy_without_sma")) for n in states[:1]]
    text.append(table("The same weights without state-memory attention", rows, columns, of,
                      lambda run, row: hardest(run[row[2]]) if row[2] in run else None, runs, rates))
    out = "\n".join(t for t in text if t)
    if "*" in out:
        out += f"* fewer than {rates} learning rates so far\n"
    return out


def main():
    a = arguments()
    results = Results(a.results, a)
    if a.dry_run:
        waiting = [r for r in all_runs(a) if r not in results]
        times = [(r, r["seconds"]) for r in results.data["runs"].values()]
        for r in waiting:
            print(f"{r.name:<44}{expected(r, times):6.0f} s" if times else r.name)
        print(f"{len(waiting)} runs of {a.epochs * 4 * (a.examples // a.batch)} steps", end="")
        print(f", {sum(expected(r, times) for r in waiting):.0f} s one after the other"
              if times else "")
        return 0
    code = 0 if a.table else Grid(a, results)()
    print(tables(results, a) or "no results yet")
    print(f"results: {a.results}")
    return code


if __name__ == "__main__":
    sys.exit(main())
