"""Two things measured in turns, since machines are shared and their speed drifts."""

import gc
import statistics
import time


def seconds(work, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def in_turns(first, second, *, rounds=15, repeats=10):
    """Median seconds of both, and the median over rounds of first / second."""
    for work in (first, second):
        seconds(work, 3)
    gc.disable()
    pairs = []
    for number in range(rounds):
        # Whichever goes first in a round may find a warmer cache: they take turns.
        if number % 2:
            a = seconds(first, repeats)
            b = seconds(second, repeats)
        else:
            b = seconds(second, repeats)
            a = seconds(first, repeats)
        pairs.append((a, b))
    gc.enable()
    ratio = statistics.median(a / b for a, b in pairs)
    return (*(statistics.median(column) for column in zip(*pairs, strict=True)), ratio)
