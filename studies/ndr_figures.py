"""The figures of the control-flow study, drawn from its result alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

LOOKS = {
    "ndr": ("#882255", "o"),
    "geometric": ("#cc6677", "v"),
    "abs_rel_gate": ("#aa4499", "^"),
    "relative_gate": ("#332288", "D"),
    "relative": ("#4477aa", "s"),
    "transformer": ("#44aa99", "P"),
    "lstm": ("#117733", "<"),
    "bilstm": ("#999933", ">"),
    "dnc": ("#b8860b", "X"),
}
"""Colour and marker of each model."""

NAMES = {
    "ndr": "Neural Data Router",
    "geometric": "geometric attention, no gate",
    "abs_rel_gate": "absolute/relative + gate",
    "relative_gate": "relative positions + gate",
    "relative": "relative positions",
    "transformer": "Transformer",
    "lstm": "LSTM",
    "bilstm": "bidirectional LSTM",
    "dnc": "DNC",
    "forward": "forward table lookup",
    "backward": "backward table lookup",
    "arithmetic": "arithmetic",
    "listops": "ListOps",
    "id": "depths of training (id)",
    "valid": "deeper (valid)",
    "f1": "edges, F1",
    "order": "dependencies in order",
    "tau": "first update and depth, tau",
    "parallelism": "overlap of parallelism",
    "gate": "nodes: open gates",
    "change": "nodes: changes of state",
    "one step": "cut for one step",
    "lasting": "cut until the end",
}

SHADES = {
    "gate": ("gate, mean over channels", 1.0),
    "change": ("share by which the state changes", 0.5),
}
"""What is shaded in a graph, and where the scale ends, by what makes its nodes."""

CURVES = {
    ("trained", "True"): ("trained, right answers", "-", "o", 0.0),
    ("trained", "False"): ("trained, wrong answers", "--", "s", 0.45),
    ("shuffled", "all"): ("trained, columns shuffled", ":", "^", 0.0),
    ("untrained", "all"): ("untrained", "-.", "v", 0.0),
}
"""Of which graphs a score is drawn: label, line, marker, how much paler than the model's colour."""

FEWEST = 5
"""Means of fewer examples than these are not drawn: their intervals say nothing."""

WIDEST = 24
"""Sequences with more columns are drawn below each other."""

READ = "#cc3311"
GATES = ListedColormap(colormaps["Greys"](np.linspace(0, 0.65, 256)), name="gates")
# Arrows and outlines must stand out from an open gate.


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name, from what `result.nc` holds.

    Those of gates and attention are left out where no model has gates.
    """
    drawn = {"accuracy": accuracy_by_depth(result), "training": accuracy_while_training(result)}
    if "control_flow" not in result.children:
        return drawn
    drawn |= {
        "scores": scores_by_depth(result),
        "cuts": answers_broken(result),
        "parallelism": done_per_step(result),
    }
    for task, models in result["graphs"].children.items():
        for model, seeds in models.children.items():
            seed, kinds = next(iter(seeds.children.items()))
            place = {"task": task, "model": model, "seed": int(seed)}
            examples = result["examples"].to_dataset().sel(place)
            title = f"{_name(model)}, {_name(task)}"
            shown = _one_of_each_depth(examples, deepest_trained(result))
            for nodes, graphs in kinds.children.items():
                drawn[f"graph_{model}_{task}_{nodes}"] = control_flow_graphs(
                    examples, graphs.to_dataset(), shown, nodes=nodes, title=title
                )
            drawn[f"attention_{model}_{task}"] = attention_by_step(
                examples, kinds["change"].to_dataset(), shown[0], title=title
            )
    return drawn


def accuracy_by_depth(result: xr.DataTree) -> Figure:
    """Accuracy at each depth, a panel for each task; every seed is a point with its interval."""
    data = result["accuracy"].to_dataset()
    tasks, models = data["task"].to_numpy(), data["model"].to_numpy()
    depth = data["depth"].to_numpy()
    figure, axes = _grid(1, len(tasks), width=3.9, height=3.0)
    for axis, task in zip(axes[0], tasks, strict=True):
        deepest = deepest_trained(result)
        axis.axvspan(depth[0] - 0.5, deepest + 0.5, color="#eeeeee", label="depths of training")
        for number, model in enumerate(models):
            here = data.sel(task=task, model=model)
            colour, marker = _look(model)
            # Beside one another, so that no interval hides another.
            places = depth + 0.6 * ((number + 0.5) / len(models) - 0.5)
            for seed in data["seed"].to_numpy():
                mean, bars = _mean_and_bars(here.sel(seed=[seed]), "accuracy_at_depth")
                axis.errorbar(
                    places, mean, yerr=bars, color=colour, marker=marker, ls="", ms=4, lw=1
                )
            axis.plot(
                places,
                here["accuracy_at_depth"].mean("seed"),
                color=colour,
                marker=marker,
                ms=4,
                lw=1.2,
                label=_name(model),
            )
        chance = float(data["chance"].sel(task=task))
        axis.axhline(chance, color="black", ls=":", lw=1, label="chance")
        axis.set_xticks(depth)
        axis.set(
            title=_name(task),
            xlabel="depth of the expression",
            xlim=(depth[0] - 0.5, depth[-1] + 0.5),
            ylim=(0, 1.02),
        )
    axes[0, 0].set_ylabel("share of right answers")
    _legend(figure, axes[0, 0])
    return figure


def accuracy_while_training(result: xr.DataTree) -> Figure:
    """Accuracy over training, a small panel for each task and model; a line for each seed."""
    curves = result["training"].to_dataset()["accuracy"]
    pairs = _pairs(curves)
    chance = result["accuracy"].to_dataset()["chance"]
    figure, axes = _panels(pairs, width=2.7, height=2.2, most=4)
    for axis, (task, model) in zip(axes.flat, pairs, strict=False):
        for split, line in (("id", "-"), ("valid", "--")):
            for number, seed in enumerate(curves["seed"].to_numpy()):
                one = curves.sel(task=task, model=model, seed=seed, split=split)
                one = one.dropna("train_step")
                axis.plot(
                    one["train_step"],
                    one,
                    color=_look(model)[0],
                    ls=line,
                    lw=1.2,
                    label=_name(split) if number == 0 else None,
                )
        axis.axhline(float(chance.sel(task=task)), color="black", ls=":", lw=0.8, label="chance")
        axis.set_title(f"{_name(model)}\n{_name(task)}", fontsize=8)
        axis.set_xlabel("training step", fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("share of right answers", fontsize=8)
    axes[0, 0].set_ylim(0, 1.02)
    _legend(figure, axes[0, 0], colour="black")
    return figure


def scores_by_depth(result: xr.DataTree) -> Figure:
    """How well the graphs match the true dataflow, by depth, beside every control."""
    data = result["control_flow"].to_dataset()
    share = (-0.03, 1.03)
    metrics = {"f1": share, "order": share, "tau": (-1.03, 1.03), "parallelism": share}
    depths = sorted((one for one in data["depth"].to_numpy() if one != "all"), key=int)
    places = np.arange(len(depths))
    deepest = depths.index(str(deepest_trained(result)))
    rows = [(*pair, kind) for pair in _pairs(data["score"]) for kind in SHADES]
    figure, axes = _grid(len(rows), len(metrics), width=2.7, height=2.4, sharey=False)
    for row, (task, model, nodes) in zip(axes, rows, strict=True):
        for axis, (metric, limits) in zip(row, metrics.items(), strict=True):
            axis.axvspan(-0.5, deepest + 0.5, color="#eeeeee", label="depths of training")
            curves = _present(CURVES, data)
            for number, (control, correct) in enumerate(curves):
                label, line, marker, _ = CURVES[control, correct]
                cell = data.sel(task=task, model=model, nodes=nodes, metric=metric, depth=depths)
                cell = cell.sel(control=control, correct=correct)
                mean, bars = _mean_and_bars(cell.where(cell["examples"] >= FEWEST), "score")
                axis.errorbar(
                    places + 0.5 * ((number + 0.5) / len(curves) - 0.5),
                    mean,
                    yerr=bars,
                    color=_shade(model, control, correct),
                    ls=line,
                    marker=marker,
                    ms=4,
                    lw=1.2,
                    elinewidth=0.9,
                    capsize=2,
                    label=label,
                )
            axis.set_xticks(places, depths)
            axis.set(xlim=(-0.5, len(depths) - 0.5), ylim=limits)
            if metric == "tau":
                axis.axhline(0, color="black", lw=0.6)
        row[0].set_ylabel(f"{_name(model)}\n{_name(task)}\n{_name(nodes)}", fontsize=8)
    for axis, metric in zip(axes[0], metrics, strict=True):
        axis.set_title(_name(metric), fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("depth of the expression")
    _legend(figure, axes[0, 0], title=f"means of {FEWEST} examples or more")
    return figure


def answers_broken(result: xr.DataTree) -> Figure:
    """How often a right answer becomes wrong when one gate or one attention edge is cut."""
    data = result["cuts"].to_dataset().sel(outcome="broken")
    pairs = _pairs(result["control_flow"].to_dataset()["score"])
    kinds = [(nodes, cut) for nodes in SHADES for cut in ("one step", "lasting")]
    figure, axes = _grid(len(pairs), len(kinds), width=2.9, height=2.6)
    for row, (task, model) in zip(axes, pairs, strict=True):
        for axis, (nodes, cut) in zip(row, kinds, strict=True):
            _draw_cuts(axis, data.sel(task=task, model=model, nodes=nodes, cut=cut), model)
        about = f"{_name(model)}\n{_name(task)}\nright answers made wrong"
        row[0].set_ylabel(about, fontsize=8)
    for axis, (nodes, cut) in zip(axes[0], kinds, strict=True):
        axis.set_title(f"{_name(nodes)}\n{_name(cut)}", fontsize=9)
    axes[0, 0].set_ylim(0, 1.12)
    figure.supxlabel("what is set to zero (above the bars: answers that were tried)", fontsize=8)
    return figure


def _draw_cuts(axis: Axes, data: xr.Dataset, model: str) -> None:
    """A bar for each condition, with how many answers it was tried on."""
    conditions = data["condition"].to_numpy()
    mean, bars = _mean_and_bars(data, "rate")
    alpha = {"on": 1.0, "off": 0.55, "no": 0.25}
    for place, condition in enumerate(conditions):
        trials = int(data["trials"].sel(condition=condition).sum())
        if trials:
            kind = "no" if condition.startswith("no ") else condition.split()[1]
            axis.bar(
                place,
                mean[place],
                0.75,
                yerr=bars[:, [place]],
                color=_look(model)[0],
                alpha=alpha[kind],
                error_kw={"lw": 1, "capsize": 2, "alpha": 1},
            )
        axis.annotate(
            f"{trials}" if trials else "none",
            (place, float(mean[place] + bars[1, place]) if trials else 0),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=6.5,
        )
    axis.axvline(len(conditions) / 2 - 0.5, color="black", lw=0.6)
    labels = [one.replace(" the path", "\nthe path") for one in conditions]
    axis.set_xticks(range(len(conditions)), labels, fontsize=7, rotation=45)


def done_per_step(result: xr.DataTree) -> Figure:
    """Operations that are done at each step beside the operations at each level of the truth.

    Mean over the examples of one depth and over seeds: of the deepest depth in training, and of
    the deepest of all.
    """
    data = result["control_flow"].to_dataset()
    pairs = _pairs(data["score"])
    depths = sorted(int(one) for one in data["depth"].to_numpy() if one != "all")
    some = dict.fromkeys((deepest_trained(result), depths[-1]))
    shown = [(nodes, depth) for nodes in SHADES for depth in some]
    figure, axes = _grid(len(pairs), len(shown), width=2.9, height=2.4, sharey=False)
    for row, (task, model) in zip(axes, pairs, strict=True):
        for axis, (nodes, depth) in zip(row, shown, strict=True):
            here = data.sel(task=task, model=model, nodes=nodes)
            inside = here["example_depth"] == depth
            every = ("seed", "example")
            axis.bar(
                here["level"],
                here["operations_per_level"].where(inside).mean(every),
                0.8,
                color="#dddddd",
                label="true operations of the level",
            )
            for control, correct in _present(CURVES, data):
                label, line, marker, _ = CURVES[control, correct]
                kept = inside
                if correct != "all":
                    kept = inside & (here["example_correct"] == (correct == "True"))
                if control == "shuffled" or int(kept.sum()) < FEWEST:
                    continue
                done = here["done_per_step"].sel(control=control).where(kept).mean(every)
                axis.plot(
                    done["step"] + 1,
                    done,
                    color=_shade(model, control, correct),
                    ls=line,
                    marker=marker,
                    ms=4,
                    lw=1.2,
                    label=label,
                )
            axis.set_ylim(0, None)
            last = max(here.sizes["step"], int(here["level"].max()))
            axis.set_xticks(range(1, last + 1, 1 + last // 12))
        about = f"{_name(model)}\n{_name(task)}\noperations per example"
        row[0].set_ylabel(about, fontsize=8)
    for axis, (nodes, depth) in zip(axes[0], shown, strict=True):
        axis.set_title(f"{_name(nodes)}\ndepth {depth}", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("level of the truth, or step (from 1)", fontsize=8)
    _legend(figure, *axes.flat, title=f"means of {FEWEST} examples or more")
    return figure


def control_flow_graphs(
    examples: xr.Dataset, graphs: xr.Dataset, shown: Sequence[int], *, nodes: str, title: str
) -> Figure:
    """Graphs of single examples: columns along x, steps downward, reads as arrows.

    Args:
        examples: `examples` of one model.
        graphs: its graphs, of the same examples.
        shown: which of them.
        nodes: what makes a node.
        title: what model and task it is.
    """
    widths = [int(graphs["valid"][example].sum()) for example in shown]
    n_steps = graphs.sizes["step"]
    stacked = sum(widths) > WIDEST
    cell = 0.36
    width = (max(widths) if stacked else sum(widths)) * cell + 2.2
    height = (n_steps + 1) * cell + 1.3
    n_rows = len(shown) if stacked else 1
    figure = Figure(figsize=(max(width, 5.5), n_rows * height + 0.6), layout="constrained")
    axes = figure.subplots(
        n_rows,
        len(shown) // n_rows,
        squeeze=False,
        gridspec_kw=None if stacked else {"width_ratios": widths},
    )
    shade, darkest = SHADES[nodes]
    image = None
    for axis, example in zip(axes.flat, shown, strict=True):
        image = _draw_graph(axis, graphs, example, darkest)
        # Where they are drawn below each other, columns are equally wide.
        axis.set_xlim(-0.5, (max(widths) if stacked else image.get_size()[1]) - 0.5)
        _label_columns(axis, examples, graphs, example)
        axis.set_title(_answers(examples, example), fontsize=9, loc="left")
    for axis in axes[:, 0]:
        axis.set_ylabel("step")
    assert image is not None
    extend = "max" if darkest < 1 else "neither"
    figure.colorbar(image, ax=axes, shrink=0.6, label=shade, extend=extend)
    low, high = (graphs.attrs[f"gate_threshold_{end}"] for end in ("low", "high"))
    enough = f"{low:.2g}" if low == high else f"{high:.2g}, then {low:.2g},"
    least = graphs.attrs["attention_threshold"]
    handles = [
        Patch(
            facecolor="none",
            edgecolor="black",
            label=f"update ({nodes} of {enough} or more)",
        ),
        Line2D([], [], color=READ, label=f"read (attention of {least:.2g} or more)"),
        Line2D([], [], color="#888888", lw=0.8, label="state that is kept"),
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3 if width > 7 else 1,
        frameon=False,
        fontsize=8,
    )
    figure.suptitle(f"{title}, {_name(nodes)}", fontsize=10)
    return figure


def attention_by_step(
    examples: xr.Dataset, graphs: xr.Dataset, example: int, *, title: str
) -> Figure:
    """Attention of one example at every step, the largest of all heads; updates are framed.

    Args: see `control_flow_graphs`; `example` is the one that is shown.
    """
    width = int(graphs["valid"][example].sum())
    n_steps = graphs.sizes["step"]
    n_columns = min(n_steps, 6 if width <= 14 else 4)
    n_rows = -(-n_steps // n_columns)
    size = max(1.9, 0.11 * width)
    figure = Figure(
        figsize=(size * n_columns + 1.3, (size + 0.35) * n_rows + 0.6), layout="constrained"
    )
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    weights = examples["attention"].isel(example=example).max("head").to_numpy()
    update = graphs["update"].isel(example=example).to_numpy()
    image = None
    for axis in axes.flat[n_steps:]:
        axis.remove()
    for step, axis in zip(range(n_steps), axes.flat, strict=False):
        image = axis.imshow(weights[step, :width, :width], vmin=0, vmax=1, cmap="Blues")
        for pos in np.flatnonzero(update[step, :width]):
            axis.add_patch(
                Rectangle((-0.5, pos - 0.5), width, 1, fill=False, ec=READ, lw=1.2, clip_on=False)
            )
        tokens = examples["token"].isel(example=example).to_numpy()[:width]
        font = 7 if width <= 14 else 4.5
        left, below = step % n_columns == 0, step + n_columns >= n_steps
        axis.set_yticks(range(width) if left else [], tokens if left else [])
        axis.set_xticks(range(width) if below else [], tokens if below else [], rotation=90)
        axis.tick_params(labelsize=font, length=1.5)
        axis.set_title(f"step {step}", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("reading column", fontsize=8)
    figure.supxlabel("column that is read", fontsize=8)
    assert image is not None
    figure.colorbar(
        image, ax=figure.axes, shrink=0.6, label="attention weight, largest of all heads"
    )
    frame = Patch(facecolor="none", edgecolor=READ, label="the column's state changes at this step")
    figure.suptitle(f"{title}, {_answers(examples, example)}", fontsize=9)
    figure.legend(handles=[frame], loc="outside lower right", frameon=False, fontsize=8)
    return figure


def _draw_graph(axis: Axes, graphs: xr.Dataset, example: int, darkest: float) -> AxesImage:
    """One example's graph; the inputs stand in a row of their own, above step 0."""
    width = int(graphs["valid"][example].sum())
    n_steps = graphs.sizes["step"]
    gate = graphs["gate"].isel(example=example).to_numpy()[:, :width]
    update = graphs["update"].isel(example=example).to_numpy()[:, :width]
    image = axis.imshow(gate, vmin=0, vmax=darkest, cmap=GATES, aspect="auto")
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_ylim(n_steps - 0.5, -1.5)
    nodes = [(pos, -1) for pos in range(width)]
    nodes += [(pos, step) for step, pos in np.argwhere(update).tolist()]
    for pos, step in nodes:
        colour = "#888888" if step < 0 else "black"
        axis.add_patch(
            Rectangle(
                (pos - 0.42, step - 0.42), 0.84, 0.84, fill=False, ec=colour, lw=1.3, clip_on=False
            )
        )
    table = ("source_pos", "source_step", "target_pos", "target_step", "weight", "head")
    mine = graphs["edge_example"].to_numpy() == example
    rows = zip(*(graphs[name].to_numpy()[mine].tolist() for name in table), strict=True)
    strongest: dict[tuple[int, ...], float] = {}
    for *ends, weight, head in rows:
        if head < 0:
            x, y0, _, y1 = ends
            axis.plot([x, x], [y0 + 0.42, y1 - 0.42], color="#888888", lw=0.8, zorder=2)
        else:
            place = tuple(ends)
            strongest[place] = max(weight, strongest.get(place, 0.0))
    for (x0, y0, x1, y1), weight in strongest.items():
        strength = min(weight, 1.0)
        axis.annotate(
            "",
            xy=(x1, y1),
            xytext=(x0, y0),
            arrowprops={
                "arrowstyle": "-|>",
                "color": READ,
                "lw": 0.5 + 1.2 * strength,
                "alpha": 0.3 + 0.7 * strength,
                "mutation_scale": 8,
                "shrinkA": 2,
                "shrinkB": 3,
                "connectionstyle": "arc3,rad=0.08",
            },
        )
    axis.set_yticks(range(-1, n_steps), ["input", *map(str, range(n_steps))])
    axis.tick_params(labelsize=8, length=2)
    return image


def _label_columns(axis: Axes, examples: xr.Dataset, graphs: xr.Dataset, example: int) -> None:
    """The token of each column, above and below."""
    tokens = examples["token"].isel(example=example).to_numpy()
    width = int(graphs["valid"][example].sum())
    axis.set_xticks(range(width), tokens[:width], fontsize=7)
    axis.tick_params(axis="x", labeltop=True)


def _answers(examples: xr.Dataset, example: int) -> str:
    one = examples.isel(example=example)
    right, answer = one["target"].item(), one["answer"].item()
    return f"depth {int(one['depth'])}: right is {right}, answered {answer}"


def _one_of_each_depth(examples: xr.Dataset, deepest: int) -> list[int]:
    """The first example of the deepest depth in training, and the first of the deepest of all."""
    depth = examples["depth"].to_numpy()
    wanted = dict.fromkeys((deepest, depth.max()))
    return [int(np.flatnonzero(depth == one)[0]) for one in wanted if one in depth]


def deepest_trained(result: xr.DataTree) -> int:
    """The depth of the deepest expressions of the training split."""
    return json.loads(result.attrs["config"])["study"]["task"]["train_depth"]


def _pairs(data: xr.DataArray) -> list[tuple[str, str]]:
    """The tasks and models that the result has something of."""
    return [
        (str(task), str(model))
        for task in data["task"].to_numpy()
        for model in data["model"].to_numpy()
        if bool(data.sel(task=task, model=model).notnull().any())
    ]


def _present(
    curves: dict[tuple[str, str], tuple[str, str, str, float]], data: xr.Dataset
) -> list[tuple[str, str]]:
    """Those curves that there are: a model may never be right, or never wrong."""
    known = set(data["correct"].to_numpy())
    return [(control, correct) for control, correct in curves if correct in known]


def _panels(
    pairs: Sequence[tuple[str, str]], *, width: float, height: float, most: int
) -> tuple[Figure, np.ndarray]:
    """A panel for each pair, the models of a task side by side, `most` at most."""
    models_of = [task for task, _ in pairs]
    n_columns = min(max(map(models_of.count, models_of)), most)
    n_rows = -(-len(pairs) // n_columns)
    figure, axes = _grid(n_rows, n_columns, width=width, height=height, sharex=False)
    for axis in axes.flat[len(pairs) :]:
        axis.remove()
    return figure, axes


def _grid(
    n_rows: int,
    n_columns: int,
    *,
    width: float,
    height: float,
    sharex: bool = True,
    sharey: bool = True,
) -> tuple[Figure, np.ndarray]:
    """Panels of a size, in inches."""
    size = (width * n_columns + 1.9, height * n_rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, sharex=sharex, sharey=sharey, squeeze=False)


def _legend(
    figure: Figure, *axes: Axes, colour: str | None = None, title: str | None = None
) -> None:
    """One legend beside the panels, of all that they show."""
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    legend = figure.legend(
        found.values(),
        found.keys(),
        loc="outside right center",
        frameon=False,
        fontsize=8,
        title=title,
        title_fontsize=8,
    )
    if colour is not None:
        for handle in legend.get_lines():
            handle.set_color(colour)


def _mean_and_bars(cell: xr.Dataset, name: str) -> tuple[xr.DataArray, np.ndarray]:
    """The mean over seeds, and how far below and above it their intervals reach: [2, point]."""
    mean = cell[name].mean("seed")
    low, high = cell[f"{name}_low"].min("seed"), cell[f"{name}_high"].max("seed")
    return mean, np.maximum([mean - low, high - mean], 0)


def _shade(model: str, control: str, correct: str) -> tuple[float, ...] | str:
    """The model's colour for its own graphs, paler for wrong answers; grey for controls."""
    if control != "trained":
        return "#888888" if control == "shuffled" else "#222222"
    paler = CURVES[control, correct][3]
    return tuple(1 - (1 - part) * (1 - paler) for part in to_rgb(_look(model)[0]))


def _look(model: str) -> tuple[str, str]:
    return LOOKS.get(model, ("#777777", "."))


def _name(key: str) -> str:
    return NAMES.get(key, key)
