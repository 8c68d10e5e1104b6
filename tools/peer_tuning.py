"""Triton's autotuner, made shorter, and what stands in for it where a kernel's speed does not
matter: in the process that calls it only. Of the latter nothing is stored, since what it picks says
nothing about speed."""
import zlib


def shorter_tuning(warmup=10, rep=40):
    """A configuration is timed for 50 ms instead of 125: with hundreds of them per operator, most of
    the time goes there. Which of two equally fast ones is taken may change."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def bench(tuner):
        if tuner._do_bench is not None:  # the library's own way of timing
            return tuner._do_bench
        return lambda call, quantiles: do_bench(call, warmup=warmup, rep=rep, quantiles=quantiles)
    Autotuner.do_bench = property(bench)


def _replace(bench, prune=None):
    from triton.runtime.autotuner import Autotuner
    if Autotuner._bench is bench:
        return None
    original = Autotuner._bench, Autotuner.prune_configs
    Autotuner._bench = bench
    if prune:
        Autotuner.prune_configs = prune
    Autotuner.check_disk_cache = lambda tuner, key, configs, run: run()
    return original


def _run_once(tuner):
    tuner.__dict__["do_bench"] = lambda call, quantiles=None: (call(), [1.0] * 3)[1]


class CompileOnly:
    """Compiles, and runs once, every kernel's configurations that belong to this part. Parts 0:
    none, the kernel runs with its first configuration."""
    parts = part = 0
    tuners = set()

    @classmethod
    def set_up(cls, parts, part):
        cls.parts, cls.part = parts, part
        for tuner in cls.tuners:  # what an earlier part has picked
            tuner.cache.clear()
        original = _replace(cls.bench)
        if original:
            cls.original = original[0]

    @staticmethod
    def bench(tuner, *args, config, **meta):
        cls = CompileOnly
        cls.tuners.add(tuner)
        name = f"{tuner.base_fn.__name__} {config}"
        if not cls.parts or zlib.crc32(name.encode()) % cls.parts != cls.part:
            return [float("inf")] * 3
        _run_once(tuner)
        return cls.original(tuner, *args, config=config, **meta)


class FirstThatRuns:
    """Takes every kernel's first configuration that the device can run."""

    @classmethod
    def set_up(cls):
        original = _replace(cls.bench, cls.prune)
        if original:
            cls.original, cls.prune_configs = original

    @staticmethod
    def prune(tuner, kwargs):
        tuner.ebb_found = False  # a new key: this is called before its configurations are tried
        return FirstThatRuns.prune_configs(tuner, kwargs)

    @staticmethod
    def bench(tuner, *args, config, **meta):
        if tuner.ebb_found:
            return [float("inf")] * 3
        _run_once(tuner)
        times = FirstThatRuns.original(tuner, *args, config=config, **meta)
        tuner.ebb_found = times[0] < float("inf")
        return times
