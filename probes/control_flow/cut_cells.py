"""Cells of control-flow graphs that an intervention cuts: on the path to the answer, or off it."""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int, Int64

from probes.control_flow.graphs import NO_HEAD, newest_update

_TIE = 1e-6
"""Less than two distances differ by."""


@dataclass(frozen=True)
class Masks:
    """Graphs as boolean masks.

    Attributes:
        update: the column updates at the step.
        on_path: the update node is the read-out column's last, or an ancestor of it.
        valid: the column is not padding.
        reads: example, step, target and source column of each read, for all heads.
    """

    update: Bool[np.ndarray, "example step pos"]
    on_path: Bool[np.ndarray, "example step pos"]
    valid: Bool[np.ndarray, "example pos"]
    reads: Int[np.ndarray, "index edge"]

    @classmethod
    def of(cls, graphs: xr.Dataset, readout: Int[np.ndarray, " example"]) -> "Masks":
        """Masks of `extract_control_flow`'s graphs, read out at the given columns."""
        columns = ("edge_example", "target_step", "target_pos", "source_pos")
        is_read = graphs["head"].to_numpy() != NO_HEAD
        return cls(
            graphs["update"].to_numpy(),
            _ancestors(graphs, readout),
            graphs["valid"].to_numpy(),
            np.stack([graphs[name].to_numpy()[is_read] for name in columns]),
        )

    def cells(
        self, condition: str, rows: slice, *, lasting: bool
    ) -> Bool[np.ndarray, "example step ..."]:
        """Cells that a condition may cut: [example, step, pos], or for edges [..., query, key]."""
        update, on_path, valid = self.update[rows], self.on_path[rows], self.valid[rows]
        # Cells of controls: a lasting cut must not reach a node on the path.
        allowed = np.ones_like(on_path)
        if lasting:
            allowed = ~np.logical_or.accumulate(on_path[:, ::-1], axis=1)[:, ::-1]
        if condition == "node on the path":
            return on_path
        if condition == "node off the path":
            return update & ~on_path & allowed
        if condition == "no node":
            return ~update & valid[:, None] & allowed
        reads = self._reads_of(rows)
        if condition == "edge on the path":
            return reads & on_path[..., None]
        if condition == "edge off the path":
            return reads & ~on_path[..., None] & allowed[..., None]
        other_columns = valid[:, None, None, :] & ~np.eye(update.shape[2], dtype=bool)
        if lasting:
            # A column that is not read now may be read later by a node on the path.
            read_on_path = reads & on_path[..., None]
            reads = np.logical_or.accumulate(read_on_path[:, ::-1], axis=1)[:, ::-1] | reads
        return on_path[..., None] & other_columns & ~reads

    def times_read(self, rows: slice) -> Int64[np.ndarray, "example pos"]:
        """How many nodes read each column."""
        return self._reads_of(rows).sum((1, 2))

    def _reads_of(self, rows: slice) -> Bool[np.ndarray, "example step query_pos key_pos"]:
        """Which column reads which, with any head."""
        example, step, target, source = self.reads
        in_rows = (example >= rows.start) & (example < rows.stop)
        n, steps, width = self.update[rows].shape
        reads = np.zeros((n, steps, width, width), dtype=bool)
        reads[example[in_rows] - rows.start, step[in_rows], target[in_rows], source[in_rows]] = True
        return reads


def _ancestors(
    graphs: xr.Dataset, readout: Int[np.ndarray, " example"]
) -> Bool[np.ndarray, "example step pos"]:
    """Mark the read-out column's last update node and its ancestors."""
    update = graphs["update"].to_numpy()
    examples, steps, width = update.shape
    rows = np.arange(examples)
    # Index 0 is the input (step -1), so that edges from it need no special case.
    reached = np.zeros((examples, steps + 1, width), dtype=bool)
    reached[rows, newest_update(update)[rows, -1, readout] + 1, readout] = True
    example, target_step, target, source_step, source = (
        graphs[name].to_numpy()
        for name in ("edge_example", "target_step", "target_pos", "source_step", "source_pos")
    )
    for step in reversed(range(steps)):
        edges = np.flatnonzero(target_step == step)
        edges = edges[reached[example[edges], step + 1, target[edges]]]
        reached[example[edges], source_step[edges] + 1, source[edges]] = True
    return reached[:, 1:]


def choose_cells(
    cells: Bool[np.ndarray, "example step ..."],
    cuts: int,
    generator: np.random.Generator,
    distance: Float[np.ndarray, "example pos"] | None = None,
) -> Int64[np.ndarray, "example cut index"]:
    """Choose random cells of each example, (step, pos) or (step, query, key); -1 if too few.

    With `distance` those whose column (of an edge, the key) has the smallest; none where it is NaN.
    """
    keys = generator.random(cells.shape)
    if distance is not None:
        of_cells = distance.reshape(len(cells), *[1] * (cells.ndim - 2), -1)
        cells, keys = cells & ~np.isnan(of_cells), _TIE * keys - of_cells
    flat = cells.reshape(len(cells), -1)
    keys = np.where(flat, keys.reshape(flat.shape), -np.inf)
    if flat.shape[1] < cuts:
        return np.full((len(cells), cuts, cells.ndim - 1), -1)
    largest = np.argpartition(keys, -cuts, axis=1)[:, -cuts:]
    index = np.stack(np.unravel_index(largest, cells.shape[1:]), axis=-1)
    index[flat.sum(axis=1) < cuts] = -1
    return index


def at_columns(
    values: Int64[np.ndarray, "example pos"], chosen: Int64[np.ndarray, "example cut index"]
) -> Int64[np.ndarray, "example cut"]:
    """The values of the columns of the chosen cells (of edges, the keys); -1 for none."""
    column = chosen[:, :, -1]
    return np.where(column >= 0, np.take_along_axis(values, column, axis=1), -1)
