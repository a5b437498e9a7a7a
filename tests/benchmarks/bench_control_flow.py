"""Extracting control-flow graphs, with networkx graphs of each example, and scoring.

Processor time, on one core: other programs do not disturb it.
"""

import time

import numpy as np
import xarray as xr

from probes import collapse_columns, extract_control_flow, score_control_flow, to_networkx

EXAMPLES, STEPS, HEADS, WIDTH = 500, 14, 8, 20


def captured(open_share: float, read_share: float, seed: int = 0) -> tuple[xr.DataArray, ...]:
    """Gates and attention with these shares of open gates and of weights above the threshold."""
    rng = np.random.default_rng(seed)
    gates = rng.random((EXAMPLES, STEPS, WIDTH), dtype=np.float32)
    gates = np.where(gates < open_share, 0.9, 0.05)
    shape = (EXAMPLES, STEPS, HEADS, WIDTH, WIDTH)
    attention = np.where(rng.random(shape, dtype=np.float32) < read_share, 0.5, 0.01)
    return (
        xr.DataArray(gates, dims=("example", "step", "pos")),
        xr.DataArray(attention, dims=("example", "step", "head", "query_pos", "key_pos")),
        xr.DataArray(np.ones((EXAMPLES, WIDTH), dtype=bool), dims=("example", "pos")),
    )


def rates(arrays: tuple[xr.DataArray, ...], rounds: int = 5) -> tuple[float, float, xr.Dataset]:
    """Examples per second: tables alone, and with a networkx graph of each; best of the rounds."""
    tables, everything = [], []
    for _ in range(rounds):
        start = time.process_time()
        graphs = extract_control_flow(*arrays)
        collapse_columns(graphs)
        tables.append(time.process_time() - start)
        for example in range(EXAMPLES):
            to_networkx(graphs, example)
        everything.append(time.process_time() - start)
    return EXAMPLES / min(tables), EXAMPLES / min(everything), graphs


def test_extraction(record):
    # Two updates per column, each with eight reads (one per head).
    usual = captured(2 / STEPS, 1 / WIDTH)
    # Half of all gates open.
    dense = captured(0.5, 1 / WIDTH)
    for name, arrays, wanted in (("", usual, 500), (", dense noise", dense, None)):
        alone, together, graphs = rates(arrays)
        nodes, edges = (
            count / EXAMPLES for count in (int(graphs["update"].sum()), graphs.sizes["edge"])
        )
        record(
            f"control flow{name}: examples per second as networkx graphs ({WIDTH} columns, "
            f"{STEPS} steps, {HEADS} heads; {nodes:.0f} updates, {edges:.0f} edges each)",
            f"{together:,.0f}; {alone:,.0f} as tables and token graphs alone",
            f"at least {wanted}" if wanted else "",
        )
        if wanted:
            assert together >= wanted


def test_scores(record):
    graphs = extract_control_flow(*captured(2 / STEPS, 1 / WIDTH))
    rng = np.random.default_rng(1)
    # A chain: column i is computed from column i - 1.
    edges = np.stack([np.arange(WIDTH - 1), np.arange(1, WIDTH)], axis=1)
    truth = xr.Dataset(
        {
            "edges": (
                ("example", "edge", "end"),
                np.broadcast_to(edges, (EXAMPLES, *edges.shape)),
            ),
            "level": (
                ("example", "pos"),
                np.broadcast_to(np.arange(WIDTH), (EXAMPLES, WIDTH)),
            ),
            "depth": ("example", rng.integers(1, 9, EXAMPLES)),
            "correct": ("example", rng.random(EXAMPLES) < 0.5),
        }
    )
    start = time.process_time()
    score_control_flow(graphs, truth, by=("depth", "correct"))
    taken = time.process_time() - start
    record("control flow: scores by 8 depths and correctness, 500 examples", f"{taken:.1f} s")
