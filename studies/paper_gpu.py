"""The runs at the size of the papers that are worth most, in the time that a GPU is there.

    python studies/paper_gpu.py --minutes 9                 # on a GPU; again, to go on
    python studies/paper_gpu.py --results --device cpu      # results of what is trained
    python studies/paper_gpu.py --show                      # the list, and how to see all settings
    python studies/paper_gpu.py training.precision=bf16     # a setting for all of them
    python studies/paper_gpu.py --tiny --device cpu         # a rehearsal at the size of tests

See `studies.engine.worklist`. The report is `paper_gpu.json` in the folder of runs. Results are
written when all entries are trained, or, with `--results`, of those that are, on any device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from studies import (
    contextual_retrieval,
    fuzzy_logic_latent_code,
    ndr_control_flow,
    raven_latent_code,
)
from studies.engine.command import Changes, exit_on
from studies.engine.folders import RunError
from studies.engine.training import Deadline
from studies.engine.worklist import Entry, Options, run_list, show

# One of the rates of each grid; evaluations, and so checkpoints, come more often.
FAST = "training.compile=true training.precision=tf32"
RAVEN = f"model=softmax,hyla,linear training.weight_decay=0.1 training.evaluate_every=2500 {FAST}"
RAVEN_RATE = f"{RAVEN} training.learning_rate=0.001"
QUICK = "training.n_steps=20 training.evaluate_every=10"
ENTRIES = (
    Entry(
        name="Raven",
        why="HYLA, softmax and linear attention at the paper's size, a seed each",
        study=raven_latent_code.STUDY,
        preset="paper",
        changes=f"{RAVEN_RATE} seed=0",
        tiny=f"model=softmax,hyla,linear {QUICK}",
    ),
    Entry(
        name="Raven, five seeds",
        why="intervals, and verdicts on the paper's claims",
        study=raven_latent_code.STUDY,
        preset="paper",
        changes=f"{RAVEN_RATE} seed=0,1,2,3,4",
        tiny=f"model=softmax,hyla,linear seed=0,1,2 {QUICK}",
        together=4,
    ),
    Entry(
        name="Raven, more instances",
        why="the scaling curve; runs of all lengths share their constant part",
        study=raven_latent_code.STUDY,
        preset="paper",
        changes=f"{RAVEN_RATE} seed=0,1,2 training.schedule=stable training.decay_steps=15000 "
        "training.n_steps=40000,80000,160000,320000",
        tiny="model=softmax,hyla,linear seed=0,1 training.schedule=stable training.decay_steps=5 "
        "training.checkpoint=last training.n_steps=10,20 training.evaluate_every=5",
        together=3,
    ),
    Entry(
        name="NDR, arithmetic",
        why="does NDR answer deeper expressions, and do its gates show the computation?",
        study=ndr_control_flow.ARITHMETIC_STUDY,
        preset="paper",
        changes=f"model=ndr,transformer seed=0,1,2 {FAST}",
        tiny=f"model=ndr,transformer seed=0,1 {QUICK}",
        together=3,
    ),
    Entry(
        name="NDR, ListOps",
        why="as arithmetic; a million expressions are made first, in a few minutes",
        study=ndr_control_flow.LISTOPS_STUDY,
        preset="paper",
        changes=f"model=ndr,transformer seed=0,1,2 {FAST}",
        tiny=f"model=ndr,transformer seed=0,1 {QUICK}",
        together=3,
    ),
    Entry(
        name="fuzzy logic",
        why="the paper's 50,000 steps",
        study=fuzzy_logic_latent_code.STUDY,
        preset="paper",
        changes="model=softmax,linear,hyla seed=0,1,2 training.learning_rate=0.001 "
        f"training.weight_decay=0.1 training.evaluate_every=2500 {FAST}",
        tiny=f"model=softmax,linear,hyla seed=0,1 {QUICK}",
        together=3,
    ),
    Entry(
        name="contextual retrieval",
        why="the paper's 100,000 steps, at the first size of its table 6",
        study=contextual_retrieval.STUDY,
        preset="paper",
        changes="task.n_searches=2 task.n_retrievals=4 d_model=64 n_heads=2,8 "
        f"model=multi_head,compositional {FAST}",
        tiny=f"seed=0,1 {QUICK}",
        together=3,
    ),
)


def main(
    changes: Changes = None,
    minutes: Annotated[float, typer.Option(help="time for this call")] = 9.0,
    out: Annotated[Path, typer.Option(help="folder of runs")] = Path("runs"),
    device: Annotated[str, typer.Option(help="where models run: cuda, cpu")] = "cuda",
    workers: Annotated[int, typer.Option(min=1, help="processes that train at the same time")] = 1,
    tiny: Annotated[bool, typer.Option("--tiny", help="rehearse at the size of tests")] = False,
    results: Annotated[
        bool, typer.Option("--results", help="train nothing; write results of what is trained")
    ] = False,
    show_list: Annotated[bool, typer.Option("--show", help="print the list; run nothing")] = False,
) -> None:
    """Train models at the size of the papers, by value, for some minutes."""
    with exit_on(ValueError, RunError):
        options = Options(
            root=out,
            device=device,
            workers=workers,
            tiny=tiny,
            results=results,
            changes=changes or (),
            report="paper_gpu.json",
        )
        if show_list:
            show(ENTRIES, options)
        else:
            run_list(ENTRIES, options, Deadline.after(minutes))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
