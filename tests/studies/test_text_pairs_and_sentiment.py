"""Studies of text: generated data, and published data on small files in the published layouts."""

import csv
import io
import json
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.measure import Measurement

import tasks
from studies.claims.coda import SIGNS, grid
from studies.claims.text import FIRST, MAP, MRR, ON_TEST, ranked
from studies.engine import Preset, Resources, Trained, metric, read_result, run
from studies.engine.command import FILE_WIDTH
from studies.engine.examples import Examples
from studies.engine.paper_claims import read_claims
from studies.engine.readings import conditions_of
from studies.measures.coda import composition
from studies.setups.quasi_attention import MOST_SHOWN, matrices
from studies.text_pairs_and_sentiment import NLI, RANKED, TEXT_PAIRS, TEXT_RANKING, TEXT_SENTIMENT

pytestmark = pytest.mark.slow

STUDIES = {study.name: study for study in (TEXT_PAIRS, TEXT_RANKING, TEXT_SENTIMENT)}
PUBLISHED = {"text_pairs": NLI, "text_ranking": RANKED, "text_sentiment": ("imdb", "sst2")}
WORDS = ["who", "what", "rain", "sun", "moon", "falls", "shines", "never", "often", "it"]
SPLITS = ("train", "dev", "test")


def sentence(generator):
    return " ".join(generator.choices(WORDS, k=generator.randint(1, 7)))


def rows_of(generator, labels, n=12):
    return [(sentence(generator), sentence(generator), labels[i % len(labels)]) for i in range(n)]


def write_json_lines(path, names, rows):
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines))


def write_tabs(path, *rows):
    path.write_text("\n".join("\t".join(map(str, row)) for row in rows))


def write_snli(folder, generator):
    names = ("sentence1", "sentence2", "gold_label")
    for split in SPLITS:
        rows = rows_of(generator, ("entailment", "neutral", "contradiction", "-"))
        write_json_lines(folder / f"snli_1.0_{split}.jsonl", names, rows)


def write_mnli(folder, generator):
    names = ("sentence1", "sentence2", "gold_label")
    for split in ("train", "dev_matched", "dev_mismatched"):
        rows = rows_of(generator, ("entailment", "neutral", "contradiction"))
        write_json_lines(folder / f"multinli_1.0_{split}.jsonl", names, rows)


def write_scitail(folder, generator):
    for split in SPLITS:
        rows = rows_of(generator, ("neutral", "entails"))
        write_tabs(folder / f"scitail_1.0_{split}.tsv", *rows)


def write_dnli(folder, generator):
    for split in SPLITS:
        rows = rows_of(generator, ("positive", "neutral", "negative"))
        items = [{"sentence1": a, "sentence2": b, "label": label} for a, b, label in rows]
        (folder / f"dialogue_nli_{split}.jsonl").write_text(json.dumps(items))


def write_trecqa(folder, generator):
    for split in SPLITS:
        lines = []
        for number in range(5):
            lines += [f"<QApairs id='{number}'>", "<question>", sentence(generator), "</question>"]
            for kind in ("positive", "negative", "negative"):
                lines += [f"<{kind}>", sentence(generator), f"</{kind}>"]
            lines.append("</QApairs>")
        (folder / f"{split}.xml").write_text("\n".join(lines))


def write_wikiqa(folder, generator):
    names = ["QuestionID", "Question", "DocumentID", "DocumentTitle", "SentenceID"]
    for split in SPLITS:
        rows = []
        for number in range(5):
            question = sentence(generator)
            for answer in range(3):
                label = int(answer == number % 3)
                rows.append((f"Q{number}", question, "D", "T", "S", sentence(generator), label))
        write_tabs(folder / f"WikiQA-{split}.tsv", [*names, "Sentence", "Label"], *rows)


def write_ubuntu(folder, generator):
    for split in SPLITS:
        is_train = split == "train"
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            others = [f"Distractor_{number}" for number in range(9)]
            names = ["Utterance", "Label"] if is_train else ["Ground Truth Utterance", *others]
            rows.writerow(["Context", *names])
            for number in range(4):
                responses = [sentence(generator) for _ in range(1 if is_train else 10)]
                rows.writerow([sentence(generator), *responses, *[number % 2] * is_train])


def write_imdb(folder, generator):
    for split, name, number in product(("train", "test"), ("neg", "pos"), range(20)):
        (place := folder / split / name).mkdir(parents=True, exist_ok=True)
        (place / f"{number}.txt").write_text(" ".join(sentence(generator) for _ in range(9)))


def write_sst2(folder, generator):
    for split in ("train", "dev"):
        rows = [(sentence(generator), number % 2) for number in range(40)]
        write_tabs(folder / f"{split}.tsv", ("sentence", "label"), *rows)


WRITERS = {
    **{"snli": write_snli, "mnli": write_mnli, "scitail": write_scitail, "dnli": write_dnli},
    **{"trecqa": write_trecqa, "wikiqa": write_wikiqa, "ubuntu": write_ubuntu},
    **{"imdb": write_imdb, "sst2": write_sst2},
}
SMALL = (
    "d_model=8 n_heads=2 n_validation=4 task.min_count=1 training.n_steps=4 training.keep_at=4 "
    "training.evaluate_every=2 training.batch_size=6 seed=0 signs.n=6 saturation.n=6 "
    "composition.n=6"
)
OF_TEXT = "d_mlp=8 task.n_valid=12 training.warmup_steps=1"
CHANGES = {
    study: SMALL
    + f" {OF_TEXT}" * (study == "text_sentiment")
    + " ranking.n=999" * (study == "text_ranking")
    for study in STUDIES
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The results of the presets `paper` on small files: all data sets, the first for both models.

    Figures are drawn for rankings alone.
    """
    place, found = tmp_path_factory.mktemp("published"), {}
    for name, write in WRITERS.items():
        (folder := place / "data" / name).mkdir(parents=True)
        write(folder, random.Random(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, study in STUDIES.items():
            of_paper = study.presets["paper"]
            first, *_ = names = tuple(PUBLISHED[name])
            grids = ({"task.name": (first,), **grid("softmax")}, {"task.name": names, **grid()})
            small = replace(study, presets={"paper": replace(of_paper, grids=grids)})
            if name != "text_ranking":
                small = replace(small, views={})
            changes = CHANGES[name].split()
            folder = run(small, "paper", changes, resources=Resources(root=place, workers=1))
            found[name] = folder, read_result(folder / "result.nc")
    return found


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The folders and results of the presets `smoke`; figures are drawn for sentences alone."""
    place, found = tmp_path_factory.mktemp("generated"), {}
    for name, study in STUDIES.items():
        of_study = study if name == "text_sentiment" else replace(study, views={})
        folder = run(of_study, "smoke", resources=Resources(root=place, workers=1))
        found[name] = folder, read_result(folder / "result.nc")
    return found


def printed(study, result):
    table = study.table.render(result)
    console = Console(width=FILE_WIDTH, file=(stream := io.StringIO()))
    assert Measurement.get(console, console.options, table).minimum <= FILE_WIDTH
    console.print(table)
    return stream.getvalue()


# Published data


@pytest.mark.parametrize("name", STUDIES)
def test_each_published_data_set_is_trained_on_and_scored(name, published):
    _, result = published[name]
    scores = result["scores"].to_dataset().sel(group="all")
    cells = zip(scores["name"].to_numpy(), scores["model"].to_numpy(), strict=True)
    first, *_ = PUBLISHED[name]
    assert set(cells) == {(first, "softmax")} | set(product(PUBLISHED[name], ("coda",)))
    assert scores["split"].to_numpy().tolist() == ["valid", "test"]
    assert np.isfinite(scores["accuracy"]).all()
    # Fresh examples: development examples that chose nothing, and all of the test.
    n_test = {"snli": 9, "mnli": 12, "scitail": 12, "dnli": 12, "trecqa": 15, "wikiqa": 15}
    n_test |= {"ubuntu": 40, "imdb": 40, "sst2": 40}
    for cell, data in enumerate(scores["name"].to_numpy()):
        counts = scores["n_examples"].isel(cell=cell)
        assert counts.sel(split="test") == n_test[data]
        n_valid = 12 if data in ("imdb", "sst2") else n_test[data]
        assert counts.sel(split="valid") == n_valid - 4
    assert (result["fairness"]["trained"] == -1).all()
    assert result["signs"]["split"].to_numpy().tolist() == ["valid", "test"]
    assert "confusion" not in result["signs"]
    assert result["matrices"]["pattern"].notnull().any()


THEIRS = {
    "snli": (84.61, 85.71),
    "mnli": (71.97, 72.45),
    "scitail": (82.0, 83.6),
    "dnli": (88.2, 88.8),
    "imdb": (82.6, 83.3),
    "sst2": (78.9, 80.6),
}


@pytest.mark.parametrize("name", ["text_pairs", "text_sentiment"])
def test_accuracies_stand_beside_those_of_the_papers_tables_3_and_5(name, published):
    _, result = published[name]
    values = metric("accuracy_paper", "test").values(result)
    for condition in conditions_of(result):
        expected = THEIRS[condition.values["name"]][condition.values["model"] == "coda"]
        assert values[condition.cells] == pytest.approx(expected / 100)
    if name == "text_pairs":
        matched = metric("accuracy_paper", "valid").values(result)
        # MNLI; development scores of SciTail and Dialogue NLI (Table 8).
        assert sorted(matched[np.isfinite(matched)]) == pytest.approx([0.7219, 0.853, 0.865])


def test_rankings_stand_beside_those_of_the_papers_table_2(published):
    _, result = published["text_ranking"]
    theirs = {
        ("trecqa", "softmax"): (0.806, 0.839, None),
        ("trecqa", "coda"): (0.800, 0.845, None),
        ("wikiqa", "coda"): (0.705, 0.724, None),
        ("ubuntu", "coda"): (None, None, 0.525),
    }
    for number, name in enumerate((MAP, MRR, FIRST)):
        paper = ranked(f"{name}_paper", "test").values(result)
        ours = ranked(name, "test").values(result)
        assert ((ours >= 0) & (ours <= 1)).all()
        for condition in conditions_of(result):
            expected = theirs[condition.values["name"], condition.values["model"]][number]
            (value,) = paper[condition.cells]
            assert np.isnan(value) if expected is None else value == expected


@pytest.mark.parametrize("name", STUDIES)
def test_claims_about_published_data_are_tried_on_them_alone(name, published, generated):
    claims = {one.statement: one for one in STUDIES[name].claims}
    tried = {}
    for kind, results in (("published", published), ("generated", generated)):
        result = results[name][1]
        data = result["claims"].to_dataset()
        run_ = data["verdict"].to_numpy() != "not run"
        tried[kind] = set(data["statement"].to_numpy()[run_].tolist())
    assert not tried["published"] & tried["generated"]
    first, *_ = PUBLISHED[name]
    of_theirs = {text for text, one in claims.items() if one.of.get("name") == first}
    assert tried["published"] == {text for text in of_theirs if "centring" not in text}
    assert tried["generated"] == {text for text, one in claims.items() if "name" not in one.of}
    assert all(claims[text].source == "ours" for text in tried["generated"])
    assert all(claims[text].source.startswith("Tay") for text in tried["published"])
    for claim in read_claims()["tay_2019"].claims:
        mine = {text for text in claims if claim.rests_on(name, text)}
        assert not mine & tried["generated"]
        assert not mine or claim.needs


@pytest.mark.parametrize("name", STUDIES)
def test_a_claim_about_published_data_is_about_the_data_that_it_names(name, published):
    names = {"Dialogue NLI": "dnli", "the Ubuntu corpus": "ubuntu", "SST": "sst2"}
    names |= {"matched MNLI": "mnli", "mismatched MNLI": "mnli"}
    _, result = published[name]
    data = result["claims"].to_dataset().to_dataframe().set_index("statement")
    n_compared = 0
    for claim in STUDIES[name].claims:
        if not claim.source.startswith("Tay"):
            continue
        where = claim.statement.removeprefix("On ").partition(" C")[0].partition(" centring")[0]
        expected = names.get(where, where.lower())
        assert claim.of["name"] == claim.exceeds["name"] == expected
        if np.isfinite(data.loc[claim.statement, "effect"]):
            values, sides = claim.reading.values(result), {}
            for condition in conditions_of(result):
                if condition.values["name"] == expected:
                    (sides[condition.values["model"]],) = values[condition.cells]
            effect = sides["coda"] - sides["softmax"]
            assert data.loc[claim.statement, "effect"] == pytest.approx(effect)
            n_compared += 1
    assert n_compared == {"text_ranking": 2}.get(name, 1)


def test_every_claim_about_centring_has_its_models_in_the_preset():
    for name in ("text_pairs", "text_ranking"):
        plan = STUDIES[name].plan("paper")
        models = [plan.coordinates(cell) for cell in plan.cells]
        claims = [one for one in STUDIES[name].claims if "centring" in one.statement]
        assert len(claims) == 4
        for claim, side in product(claims, ("of", "other")):
            wanted = getattr(claim, side)
            assert any(wanted.items() <= one.items() for one in models), claim.statement


@pytest.mark.parametrize("name", STUDIES)
def test_the_table_and_the_views_of_published_data_are_drawn(name, published):
    study, (folder, result) = STUDIES[name], published[name]
    text = printed(study, result)
    assert "paper" in text
    shown = {"text_pairs": "SNLI", "text_ranking": "WikiQA", "text_sentiment": "IMDb"}[name]
    assert shown in text
    if name == "text_ranking":
        # No signs are planted.
        figures = {path.stem for path in folder.glob("*.png")}
        assert figures == set(study.views) - {"signs", "matches", "tuning"}
    else:
        assert study.views["composition"](result).axes
        assert study.views["signs"](result) is None


@pytest.mark.parametrize("name", STUDIES)
def test_missing_data_are_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup = STUDIES[name].plan("paper").cells[0]
    with pytest.raises(FileNotFoundError, match=f"path must be a folder with {setup.task.name}"):
        setup.prepare()


def test_the_preset_paper_passes_over_the_data_as_often_as_the_paper():
    """50 epochs, batches of 64, on SciTail of 32; 20 epochs for rankings."""
    expected = {"snli": 429_192, "mnli": 306_798, "scitail": 36_868, "dnli": 242_273}
    expected |= {"trecqa": 16_692, "wikiqa": 6_362, "ubuntu": 312_500}
    found = {
        cell.task.name: cell.training
        for name in ("text_pairs", "text_ranking")
        for cell in STUDIES[name].plan("paper").cells
    }
    assert {name: training.n_steps for name, training in found.items()} == expected
    sizes = {name: training.batch_size for name, training in found.items()}
    assert sizes == dict.fromkeys(expected, 64) | {"scitail": 32}


# Generated data


@pytest.mark.parametrize("name", STUDIES)
def test_generated_texts_have_all_that_is_looked_at(name, generated):
    folder, result = generated[name]
    study = STUDIES[name]
    text = printed(study, result)
    for word in ("CoDA", "softmax", "M<0", "signs", "untrained"):
        assert word in text
    assert "paper" not in text.partition("In percent")[0]
    if name == "text_sentiment":
        assert {path.stem for path in folder.glob("*.png")} == set(study.views) - {"tuning"}
    else:
        assert study.views["matrices"](result).axes
    assert np.isfinite(SIGNS["trained"].values(result)).all()
    assert np.isnan(ON_TEST.values(result)).all()


@pytest.mark.parametrize("name", STUDIES)
def test_words_stand_beside_the_matrices_of_their_example(name):
    setup = next(cell for cell in STUDIES[name].plan("smoke").cells if cell.model == "coda")
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    found, batches = {}, {}
    for measure, split in ((matrices, "ood"), (composition, "id")):
        trained = Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("x"))
        found[measure] = measure(trained, 3)
        same = Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("x"))
        batches[measure] = same.batch(split, 3)
    for measure, data in found.items():
        words = setup.sampler().words(batches[measure], 0)
        queries, keys = words if isinstance(words, tuple) else (words, words)
        one = data if measure is composition else data.isel(example=0)
        for side, tokens in (("query", queries), ("key", keys)):
            shown = one[side].to_numpy().tolist()
            assert shown == [*tokens, *[""] * (len(shown) - len(tokens))]
    pattern = found[matrices]["pattern"].isel(example=0, layer=0, head=0)
    is_valid = setup.places(batches[matrices])[setup.shown].valid[0]
    assert np.array_equal(pattern.notnull().to_numpy(), is_valid.numpy())


def test_a_long_text_is_shown_from_its_beginning():
    setup = next(c for c in TEXT_SENTIMENT.plan("smoke").cells if c.model == "coda")
    setup = replace(setup, task=tasks.NegatedSentimentConfig(clauses=(8, 8), words=(6, 6)))
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    found = matrices(Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("x")), 2)
    assert found.sizes["query_pos"] == found.sizes["key_pos"] == MOST_SHOWN
    assert (found["key"] != "").all()


@pytest.mark.parametrize("name", STUDIES)
def test_both_models_get_the_same_rates_and_seeds(name):
    cells = STUDIES[name].plan("laptop").cells
    tried = {
        model: {(one.training.learning_rate, one.seed) for one in cells if one.model == model}
        for model in ("softmax", "coda")
    }
    assert len(cells) == 18
    assert tried["softmax"] == tried["coda"]
    assert tried["coda"] == set(product((1e-3, 2e-3, 4e-3), (0, 1, 2)))
    assert STUDIES[name].tuned == ("training.learning_rate",)


def test_presets_have_these_numbers_of_models():
    # Softmax attention, CoDA plain, centred and doubled; both with the F of two layers; centrings.
    numbers = {
        "text_pairs": 3 * (4 * (1 + 3 + 2) + 2 * 2),
        "text_ranking": 3 * (3 * (1 + 3 + 2) + 2),
        "text_sentiment": 3 * 2 * (1 + 3 + 1),
    }
    assert {name: len(study.plan("paper").cells) for name, study in STUDIES.items()} == numbers
    assert all(isinstance(study.presets["smoke"], Preset) for study in STUDIES.values())
