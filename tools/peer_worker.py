"""Tasks in processes of their own: one that crashes, loses the CUDA context or never ends costs its
own result only.

  for task, result in run_all(tasks, run, processes=1, limit=300): ...

run(task, report) is called in a child; each report({...}) adds to the task's result, so that what
was known before a failure is kept. A failure is result["error"]. A child serves one task after the
other and is replaced when it has failed.
"""
import multiprocessing
import os
import signal
import time
from multiprocessing import connection


def first_line(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _serve(pipe, run):
    os.setsid()  # what the task starts itself (ptxas, compile workers) dies with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            run(task, lambda part: pipe.send(("part", part)))
            pipe.send(("done", None))
        except BaseException as error:
            pipe.send(("failed", first_line(error)))
            os._exit(1)


class _Worker:
    """One child and the task it is at."""

    def __init__(self, run):
        self._run, self._child, self.pipe, self.task = run, None, None, None

    def start(self, task, limit):
        if self._child is None:
            self.pipe, theirs = multiprocessing.Pipe()
            # Forked: what the caller has imported need not be imported again for each child. It
            # must not have touched the GPU yet.
            self._child = multiprocessing.get_context("fork").Process(
                target=_serve, args=(theirs, self._run))
            self._child.start()
            theirs.close()
        self.task, self.result, self.began = task, {}, time.monotonic()
        self.limit, self.deadline = limit, self.began + limit
        self.pipe.send(task)

    def step(self):
        """What has arrived or expired; true when the task is over."""
        try:
            while self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "part":
                    self.result.update(value)
                elif kind == "done":
                    return True
                else:
                    return self._fail(value)
        except (EOFError, OSError):
            self._child.join(5)
            code = self._child.exitcode
            return self._fail(f"the process ended ({signal.Signals(-code).name})"
                              if code and code < 0 else f"the process ended (exit code {code})")
        if time.monotonic() > self.deadline:
            return self._fail(f"stopped after {self.limit:.0f} s")
        return False

    def _fail(self, why):
        self.result["error"] = why
        self.stop()
        return True

    def stop(self):
        if self._child is None:
            return
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:  # not even a group of its own yet, or gone
            self._child.kill()
        self._child.join()
        self.pipe.close()
        self._child = None


def run_all(tasks, run, *, processes=1, limit=300.0, budget=None):
    """Yields (task, result) in the order in which they end; result["seconds"] is how long it took.
    After `budget` seconds no further task is begun: those come with an error that says so."""
    end = None if budget is None else time.monotonic() + budget
    waiting = list(tasks)
    workers = [_Worker(run) for _ in range(max(1, min(processes, len(waiting))))]
    try:
        while True:
            for w in workers:
                left = limit if end is None else min(limit, end - time.monotonic())
                if w.task is None and waiting and left > 0:
                    w.start(waiting.pop(0), left)
            busy = [w for w in workers if w.task is not None]
            if not busy:
                break
            wait = min(w.deadline for w in busy) - time.monotonic()
            connection.wait([w.pipe for w in busy], max(0.05, wait + 0.05))
            for w in busy:
                if w.step():
                    w.result["seconds"] = round(time.monotonic() - w.began, 1)
                    task, w.task = w.task, None
                    yield task, w.result
        for task in waiting:
            yield task, {"error": "not reached within the time given"}
    finally:
        for w in workers:
            w.stop()
