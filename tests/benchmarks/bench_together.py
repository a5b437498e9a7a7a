"""How much faster several seeds train as one batched model than one after another.

On one core each, as the workers of a study do: the ratio is that of seeds per hour.
"""

from dataclasses import replace

import pytest
import torch

from studies import (
    contextual_retrieval,
    fuzzy_logic_latent_code,
    modular_routing,
    ndr_control_flow,
    raven_latent_code,
)
from studies.engine.examples import Examples
from studies.engine.processes import Processes
from studies.engine.training import keep_freed_memory
from studies.engine.updates import SingleUpdates, StackedUpdates
from tests.benchmarks.timing import in_turns

keep_freed_memory()  # as `train` does

STUDIES = {
    "Raven, K=2": (raven_latent_code.STUDY, ("softmax", "linear", "hyla")),
    "table lookup": (ndr_control_flow.STUDY, ("ndr",)),
    "routing": (modular_routing.STUDY, ("cross_attention", "encoder", "monolithic")),
    "contextual retrieval": (contextual_retrieval.STUDY, ("multi_head", "compositional")),
    "fuzzy logic": (fuzzy_logic_latent_code.STUDY, ("softmax", "hyla")),
}
CASES = [(what, model) for what, (_, models) in STUDIES.items() for model in models]


def models_of(setup, seeds):
    setups = [replace(setup, seed=seed) for seed in range(seeds)]
    models = [of.build(torch.Generator().manual_seed(of.seed)).train() for of in setups]
    batches = [Examples(of, "cpu").train(0, setup.training.batch_size) for of in setups]
    return models, batches


@pytest.mark.parametrize(("what", "model"), CASES)
def test_seeds_together(what, model, record):
    study = STUDIES[what][0]
    setup = next(cell for cell in study.plan("laptop").cells if cell.model == model)
    config, objective = setup.training, setup.loss
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ratios = []
    for n in (3, 10):
        (alone, *_), (batch, *_) = models_of(setup, 1)
        processes = Processes(torch.device("cpu"))
        single = SingleUpdates(
            alone, config=config, objective=objective, seed=0, processes=processes
        )
        models, batches = models_of(setup, n)
        stacked = StackedUpdates(models, config=config, objective=objective, seeds=range(n))
        one, several, _ = in_turns(
            lambda single=single, batch=batch: single.update([batch], 0),
            lambda stacked=stacked, batches=batches: stacked.update(batches, 0),
            rounds=5,
            repeats=4,
        )
        ratios.append(f"{n * one / several:.2f} ({n} seeds)")
    torch.set_num_threads(n_threads)
    record(
        f"seeds per hour together / one after another, {what}, {model}", ", ".join(ratios), "1.5"
    )
