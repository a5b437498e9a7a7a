"""What a cell of a study really is, in the names of the tables of papers.

The values come from the task, the model and the training that the cell builds, not from the text of
a preset.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from studies.engine import Setup
from studies.engine.study import Plan
from studies.setups.equations import EquationsSetup
from studies.setups.expressions import ExpressionSetup
from studies.setups.latent_code import FuzzySetup, RavenSetup
from studies.setups.mlu import MluSetup
from studies.setups.pictures import EsbnSetup, ImagesSetup, SortOfClevrSetup, TrianglesSetup
from studies.setups.question_answering import FactQuestionsSetup, StoredQuestionsSetup
from studies.setups.retrieval import RetrievalSetup
from studies.setups.scan import ScanSetup
from studies.setups.signed_pairs import SignedPairsSetup
from studies.setups.stored_texts import StoredPairsSetup, StoredTextSetup
from studies.setups.text import LanguageSetup, TextPairingSetup
from studies.setups.text_generation import (
    AlgoLispSetup,
    StoredProgramSetup,
    StoredTranslationSetup,
    TranslationSetup,
)
from tests.studies.papers import benchmark_facts
from tests.studies.papers.coda_facts import (
    mlu_facts,
    pairs_facts,
    reader_facts,
    stored_pairs_facts,
    stored_text_facts,
)
from tests.studies.papers.equation_facts import equation_facts
from tests.studies.papers.expression_facts import expression_facts
from tests.studies.papers.generation_facts import generation_facts
from tests.studies.papers.language_facts import language_facts
from tests.studies.papers.latent_code_facts import fuzzy_facts, raven_facts, seed_fact
from tests.studies.papers.retrieval_facts import retrieval_facts


def training_facts(setup: Setup) -> dict[str, Any]:
    """Facts about the optimizer, the schedule and the choice of a checkpoint."""
    config = setup.training
    names = (
        "learning_rate final_learning_rate schedule weight_decay decayed warmup_steps beta2 clip "
        "n_steps batch_size evaluate_every stop_at checkpoint precision"
    )
    facts = {f"training.{name}": getattr(config, name) for name in names.split()}
    selection = f"{setup.selection.split} {setup.selection.metric}"
    # Batches are drawn from all lengths.
    more = {"training.selection": selection, "training.length_bucketed_batches": False}
    return facts | more


FACTS: Mapping[type[Setup], Callable[[Any], dict[str, Any]]] = {
    RavenSetup: raven_facts,
    FuzzySetup: fuzzy_facts,
    LanguageSetup: language_facts,
    ExpressionSetup: expression_facts,
    RetrievalSetup: retrieval_facts,
    SortOfClevrSetup: benchmark_facts.sort_of_clevr_facts,
    TrianglesSetup: benchmark_facts.triangles_facts,
    ImagesSetup: benchmark_facts.images_facts,
    EsbnSetup: benchmark_facts.esbn_facts,
    ScanSetup: benchmark_facts.scan_facts,
    TextPairingSetup: benchmark_facts.text_facts,
    EquationsSetup: equation_facts,
    MluSetup: mlu_facts,
    SignedPairsSetup: pairs_facts,
    StoredPairsSetup: stored_pairs_facts,
    StoredTextSetup: stored_text_facts,
    TranslationSetup: generation_facts,
    AlgoLispSetup: generation_facts,
    StoredTranslationSetup: generation_facts,
    StoredProgramSetup: generation_facts,
    FactQuestionsSetup: reader_facts,
    StoredQuestionsSetup: reader_facts,
}
"""The facts about task and model, by the class of the setup."""


def facts_of(setup: Setup, plan: Plan) -> dict[str, Any]:
    """All facts about a cell of a plan by their names; None is "none"."""
    facts = facts_but_seeds(replace(setup, seed=0), plan.measures["scores"].n_test)
    seeds = {"seed": setup.seed}
    if "task.seed" in facts:
        seeds["task.seed"] = seed_fact(setup)
    return facts | seeds


@functools.cache
def facts_but_seeds(setup: Setup, n_test: int) -> dict[str, Any]:
    """The facts of all cells that differ in their seed alone."""
    training = setup.training
    # A task with a fixed training set has its own number of examples.
    facts = {"task.n_train": training.n_steps * training.batch_size, "task.n_test": n_test}
    facts |= training_facts(setup) | FACTS[type(setup)](setup)
    return {name: "none" if value is None else value for name, value in facts.items()}
