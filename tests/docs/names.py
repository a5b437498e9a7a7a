"""What the examples in docstrings take for granted, by the folder of what they show."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import xarray as xr

import mechanisms
import probes
import tasks
from probes import plots
from tests.docs import data_sets, published


def names_of(module: str) -> dict[str, object]:
    """The names for the examples of a module: libraries, all exports, and what its folder adds.

    Data sets for it are written to the current folder.
    """
    package = {"mechanisms": mechanisms, "tasks": tasks, "probes": probes}[module.split(".")[0]]
    names: dict[str, object] = {name: getattr(package, name) for name in package.__all__}
    names |= {"numpy": np, "torch": torch, "xarray": xr, "xr": xr, "Path": Path}
    names |= {"mechanisms": mechanisms, "tasks": tasks, "probes": probes, "plots": plots}
    for part, make in BY_MODULE.items():
        if f"{module}.".startswith(f"{part}."):
            names |= make()
    return names


def transformer(seed=0, **changes):
    """A small transformer that reads ten words in five positions."""
    sizes = {"d_input": 10, "d_output": 10, "d_model": 16, "n_layers": 2, "inputs": "tokens"}
    parts = {
        "attention": mechanisms.AttentionConfig(n_heads=4, d_head=4),
        "feed_forward": mechanisms.FeedForwardConfig(d_mlp=16),
    }
    config = mechanisms.TransformerConfig(positions="sinusoidal", **(parts | sizes | changes))
    return mechanisms.Transformer(config, generator=torch.Generator().manual_seed(seed)).eval()


def words(seed, n=40):
    """Sentences of five words; the label is the parity of the first."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, (n, 5), generator=generator)
    rule = (tokens % 2)[:, :2]
    return tasks.Batch(tokens, tokens[:, :1], torch.ones(n, 1).bool(), {"rule": rule})


@cache
def of_mechanisms():
    parts = {
        "attention": mechanisms.AttentionConfig(n_heads=4, d_head=4),
        "feed_forward": mechanisms.FeedForwardConfig(d_mlp=32),
    }
    return parts | {"model": transformer(), "x": torch.randn(2, 5, 16), "tokens": words(0).inputs}


@cache
def of_modular():
    sizes = {"n_variables": 5, "d_model": 16, "n_layers": 2, "n_modules": 4}
    matching = mechanisms.MatchingConfig(d_key=8)
    router = mechanisms.CrossAttentionRouterConfig(matching=matching)
    config = mechanisms.ModularNetworkConfig(router=router, d_input=9, **sizes)
    names = {"sizes": mechanisms.RouterSizes(**sizes), "matching": matching}
    names |= {"network": mechanisms.ModularNetwork(config), "encoded": torch.randn(3, 5, 16)}
    return names | {"inputs": torch.randn(3, 5, 9), "targets": torch.randn(3, 1)}


@cache
def of_randomness():
    from mechanisms.dropout import dropout
    from mechanisms.randomness import draw

    return {"draw": draw, "dropout": dropout}


@cache
def of_tasks():
    task = tasks.Raven(tasks.RavenConfig(n_features=2))
    batch = task.batch("id_unpermuted", 0, 20)
    return {"task": task, "batch": batch}


@cache
def of_ranking():
    task = tasks.PlantedRanking(tasks.PlantedRankingConfig())
    batch = task.batch("ood", 0, 20)
    return {"batch": batch, "logits": torch.randn(20, 1, 2)}


@cache
def of_capturing():
    batches = [words(seed) for seed in range(2)]
    dims = ("example", "pos", "head", "d_head")
    valid = torch.ones(80, 5, 5).bool()
    places = {"self": probes.AttentionPlace("blocks.*.attn.", valid)}

    def score(data):
        return probes.score_signedness(**data, resamples=20)

    names = {"model": transformer(), "batches": batches, "dims": dims, "valid": valid}
    return names | {"places": places, "score": score}


def codes(seed, label=lambda features: features[..., 0] > 0):
    """Codes of a feature in two layers, with a label that can be read from them."""
    features = np.random.default_rng(seed).normal(size=(60, 2, 3))
    code = xr.DataArray(features, dims=("example", "layer", "feature"))
    first = features[:, 0]
    names = {"rule": label(first).astype(int), "number": first[:, 0]}
    labels = {name: ("example", values) for name, values in names.items()}
    has = (("example", "term"), (first[:, :2] > 0).astype(int))
    return xr.Dataset({"code": code, **labels, "has": has})


@cache
def of_decoding():
    sets = [codes(seed) for seed in range(4)]
    along = [data[["code", "has"]].assign_coords(term=["a", "b"]) for data in sets[2:]]
    names = dict(zip(("train", "ood"), sets[:2], strict=True))
    return names | dict(zip(("fit", "test"), along, strict=True)) | {"data": sets[0]}


@cache
def of_interventions():
    fit, test = words(0, 60), words(1, 60)
    base, source = words(2, 30).inputs, words(3, 30).inputs
    query, keys = torch.full((30,), 4), torch.tensor([[1, 2]]).expand(30, 2)
    names = {"model": transformer(n_readout=1), "fit": fit, "test": test, "base": base}
    names |= {"query": query, "keys": keys, "source": source, "answers": source[:, :1]}
    return names | {"batches": [fit]}


@cache
def of_latent_codes():
    task = tasks.Raven(tasks.RavenConfig(n_features=2))
    base, source = (task.batch("id_unpermuted", index, 400) for index in range(2))
    config = {"d_input": task.batch("id", 0, 1).inputs.shape[-1], "d_output": 8}
    model = transformer(inputs="vectors", n_readout=2, **config)
    query, keys = tasks.raven_last_row(2)
    names = {"task": task, "model": model, "base": base, "source": source, "batches": [base]}
    names |= {"query": query[:1].expand(400), "keys": keys[:1].expand(400, 2)}
    return names | {"answers": source.targets}


@cache
def of_alignment():
    names = of_latent_codes()
    fit, ood = (
        tuple(names["task"].batch(split, index, 40) for index in range(2))
        for split in ("id_unpermuted", "ood_unpermuted")
    )
    return names | {"fit": fit, "ood": ood}


@cache
def of_attribution():
    """A bridge whose head 0.1 moves the token at position 1 to the last logits."""
    from transformer_lens.patching import get_act_patch_attn_head_out_by_pos

    from tests.probes.interventions import planted

    bridge, read = planted.planted_bridge(), planted.READ
    clean, corrupted = planted.pairs(2, read)
    clean[:, read], corrupted[:, read] = 0, 1

    def metric(logits, rows):
        return logits[:, -1, 0] - logits[:, -1, 1]

    with torch.no_grad():
        clean_cache = bridge.run_with_cache(clean)[1]
    names = {"bridge": bridge, "clean": clean, "corrupted": corrupted, "metric": metric}
    names |= {"targets": clean[:, read], "clean_cache": clean_cache}
    return names | {"get_act_patch_attn_head_out_by_pos": get_act_patch_attn_head_out_by_pos}


@cache
def of_swaps():
    task = tasks.Raven(tasks.RavenConfig(n_features=2))
    base, source = (task.batch("id", index, 20) for index in range(2))
    with_carry_of_source = task.counterfactual(base, {"rule": source.latents["rule"]}).targets
    names = {"task": task, "base": base.inputs, "source": source.inputs}
    return names | {"with_carry_of_source": with_carry_of_source, "base_answers": base.targets}


def router(task, seed=0):
    """A small Neural Data Router, untrained."""
    sizes = {"d_input": len(task.vocabulary), "d_output": len(task.answers), "d_model": 16}
    config = mechanisms.NeuralDataRouterConfig.named("ndr", **sizes, d_mlp=16, n_heads=2, n_steps=4)
    generator = torch.Generator().manual_seed(seed)
    return mechanisms.NeuralDataRouter(config, generator=generator).eval()


@cache
def of_control_flow():
    task = tasks.TableLookup(tasks.TableLookupConfig())
    batch = task.batch("id", 0, 20)
    model, initial_model = router(task), router(task, 1)
    truth = tasks.column_dataflow(batch)

    def answer(logits):
        return logits.flatten(0, -2).argmax(-1)

    columns = probes.capture_control_flow(model, [batch], answer=answer)
    other = probes.capture_control_flow(initial_model, [batch], answer=answer)
    graphs = probes.extract_control_flow(
        columns["gate"], columns["attention"], truth["valid"], gate_threshold=0.05
    )
    words = ["BOS", *task.words(batch, 0), "EOS"]
    names = {"model": model, "initial_model": initial_model, "batch": batch, "batches": [batch]}
    names |= {"inputs": batch.inputs, "valid": truth["valid"], "truth": truth, "answer": answer}
    names |= {"targets": batch.targets[:, 0]}
    names |= {"column_dataflow": tasks.column_dataflow, "tokens": words}
    return names | {"columns": columns, "other": other, "graphs": graphs}


class Loop(torch.nn.Module):
    """Applies one layer four times, and reads its answer from the first position."""

    def __init__(self):
        super().__init__()
        self.embed, self.core = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, tokens):
        state = self.embed(tokens)
        for _ in range(4):
            state = torch.tanh(self.core(state))
        return self.head(state[:, 0])


@cache
def of_loops():
    torch.manual_seed(0)
    loop, batch = Loop().eval(), words(0)
    model = probes.hooked(loop)
    targets = xr.DataArray(batch.targets[:, 0].numpy() % 3, dims="example")
    step = probes.Quantity(
        "core.hook_out", ("example",), lambda state: loop.head(state[:, 0]).argmax(-1), fires="each"
    )
    answers = probes.capture(model, [batch], {"answer": step})["answer"]
    depth = xr.DataArray(np.arange(40) % 4, dims="example")
    data = xr.Dataset({"depth": depth, "answer": answers, "n_updates": depth + 1})
    state = probes.Quantity("core.hook_out", ("example", "pos", "d_model"), fires="each")
    names = {"model": model, "batches": [batch], "batch": batch, "targets": targets}
    names |= {"inputs": batch.inputs, "hook": "core.hook_out"}

    def head(state):
        return loop.head(state[:, 0])

    return names | {"head": head, "data": data, "answers": answers, "state": state}


@cache
def of_nudges():
    task = tasks.TableLookup(tasks.TableLookupConfig())
    batch = task.batch("id", 0, 20)
    names = {"model": router(task), "batch": batch, "inputs": batch.inputs}
    return names | {"hook": "blocks.*.hook_resid_post"}


@cache
def of_modules():
    task = tasks.MathEquations(tasks.MathEquationsConfig(n_operators=2))
    sizes = {"n_variables": task.n_variables, "d_input": task.n_features, "d_model": 16}
    config = mechanisms.ModularNetworkConfig(
        router=mechanisms.CrossAttentionRouterConfig(matching=mechanisms.MatchingConfig(d_key=8)),
        n_layers=2,
        n_modules=4,
        **sizes,
    )
    model, untrained = (
        mechanisms.ModularNetwork(config, generator=torch.Generator().manual_seed(seed)).eval()
        for seed in range(2)
    )
    # Enough examples of each of two tasks that 64 of them can be labelled.
    one, of_two = task.batch("id", 0, 300), torch.arange(300) % 2
    batch = tasks.Batch(one.inputs, one.targets, one.mask, one.latents | {"task": of_two})
    choice = probes.Quantity("layers.*.hook_module_choice", ("example", "module"))
    data = probes.capture(model, [batch], {"choice": choice}, latent_dims={})
    data["operation"] = (("example", "layer"), batch.latents["operator"].numpy())
    scores = probes.score_specialization(
        data["choice"], data["operation"], operations=5, resamples=20
    )
    names = {"model": model, "untrained": untrained, "batch": batch, "data": data}
    names |= {"inputs": batch.inputs, "targets": batch.targets, "task": batch.latents["task"]}
    routed = torch.tensor(data["choice"].argmax("module").to_numpy())
    return names | {"routed": routed, "scores": scores, "results": {"end to end": scores}}


@cache
def of_oracle():
    return of_modules() | {"other": of_modules()["untrained"]}


@cache
def of_specialization():
    names = of_modules()
    return names | {"other": names["batch"]}


@cache
def of_pairing():
    task = tasks.ContextualRetrieval(tasks.ContextualRetrievalConfig())
    attention = mechanisms.CompositionalAttentionConfig(n_searches=2, n_retrievals=4, d_head=8)
    sizes = {"d_input": task.n_features, "d_output": 1, "d_model": 16, "d_mlp": 16}
    config = mechanisms.RetrievalNetworkConfig(attention=attention, **sizes)
    model = mechanisms.RetrievalNetwork(config, generator=torch.Generator().manual_seed(0)).eval()
    batch, hook = task.batch("id", 0, 60), "blocks.0.attn.hook_value_scores"
    captured = {"value_scores": probes.Quantity(hook, ("example", "pos", "search", "retrieval"))}
    dims = {"preference": ("example", "pos", "true_search")}
    data = probes.capture(model, [batch], captured, latent_dims=dims)
    scored = probes.score_pairing(data["value_scores"], data["preference"], resamples=20)

    def error(output, part):
        return task.score(output, batch[part])["absolute_error"].mean(1)

    names = {"task": task, "model": model, "batches": [batch], "data": data, "error": error}
    names |= {"inputs": batch.inputs, "truth": batch.latents["preference"]}
    return names | {"assignment": scored.isel(fitted=0)}


@cache
def of_signedness():
    coda = mechanisms.CodaAttentionConfig(n_heads=4, d_head=4)
    batch, model = words(0), transformer(attention=coda)
    dims = ("example", "head", "query_pos", "key_pos")
    hook = probes.Quantity("blocks.*.attn.hook_pattern", dims)
    pattern = probes.capture(model, [batch], {"pattern": hook})["pattern"]
    shape = {dim: pattern.sizes[dim] for dim in ("example", "query_pos", "key_pos")}
    rng = np.random.default_rng(0)
    sign = xr.DataArray(rng.integers(-1, 2, tuple(shape.values())), dims=tuple(shape))
    valid = xr.ones_like(sign, dtype=bool)
    signs, pairs = (torch.tensor(one.to_numpy()) for one in (sign, valid))
    places = {"self": probes.AttentionPlace("blocks.*.attn.", pairs, signs)}
    captured = xr.Dataset({"affinity": pattern - 0.2, "dissimilarity": pattern, "pattern": pattern})
    names = {"model": model, "batch": batch, "places": places, "pattern": pattern, "sign": sign}
    return names | {
        "valid": valid,
        "captured": captured,
        "data": {"pattern": pattern, "valid": valid},
    }


@cache
def of_places():
    place = of_signedness()["places"]["self"]
    return {"valid": place.valid, "sign": place.sign}


@cache
def of_rates():
    names = of_interventions()
    fit, test = names["fit"], names["test"]
    read = {"answer": lambda logits: logits.argmax(-1), "resamples": 20}
    used = probes.erase(
        names["model"],
        fit.inputs,
        fit.latents["rule"][:, 0],
        test.inputs,
        hooks={"layer 0": "blocks.0.hook_resid_post"},
        entries=np.s_[:, -1],
        outcomes={"right": test.targets},
        draws=1,
        **read,
    )
    patched = probes.interchange(
        names["model"],
        names["base"],
        names["source"],
        hooks={"all": "blocks.*.attn.hook_pattern"},
        where=torch.ones(30, 1, 1, 1).bool(),
        outcomes={"source_rule": names["answers"]},
        **read,
    )
    return of_signedness() | {"used": used, "patched": patched}


@cache
def of_expressions():
    return {"task": tasks.TableLookup(tasks.TableLookupConfig())}


@cache
def of_grouping():
    return {
        "errors": torch.rand(20),
        "batch": SimpleNamespace(latents={"rule": torch.arange(20) % 8}),
    }


@cache
def of_pointing():
    rng = np.random.default_rng(0)
    truth, position = (xr.DataArray(rng.integers(4, size=40), dims="example") for _ in range(2))
    strongest = xr.DataArray(rng.integers(4, size=(40, 3)), dims=("example", "head"))
    return {"strongest": strongest, "truth": truth, "position": position}


@cache
def of_curves():
    names = of_control_flow()
    attention = names["columns"]["attention"]
    roles = probes.score_heads(attention, names["truth"])["role"].to_numpy()
    ones = xr.DataArray(np.ones((10, 6)), dims=("window", "pos"))
    return {
        "loss": ones,
        "mask": ones > 0,
        "attention": attention,
        "truth": names["truth"],
        "role": roles[0],
    }


@cache
def of_subspaces():
    names = of_alignment()
    (base, source), task = names["fit"], names["task"]
    swaps = probes.swap(task, base, source, {"rule": {"rule": source.latents["rule"]}})
    found = probes.align(
        names["model"],
        swaps,
        {"ood": swaps},
        sites={"layer 1": probes.Vector("blocks.1.hook_resid_post", np.s_[:, -1])},
        logits=lambda output: output,
        ranks=[4],
        epochs=1,
        draws=1,
        resamples=20,
    )
    return {"found": found}


@cache
def of_windows():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, (20, 9), generator=generator)
    batch = tasks.Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(20, 8).bool(), {})
    return {"model": transformer(causal=True), "batches": [batch]}


@cache
def of_decoders():
    names = of_decoding()
    found = probes.compare_means(names["data"].rename(rule="label"), label="label")
    return names | {"found": found.sel(control="observed", centring="mean", layer="all")}


@cache
def of_matrices():
    routed, signs = of_control_flow(), of_signedness()
    gates = probes.Quantity("blocks.*.hook_gate", ("example", "pos", "channel"))
    captured = probes.capture(routed["model"], routed["batches"], {"gates": gates})
    columns = routed["columns"].assign(gates=captured["gates"].rename(layer="step"))
    value_scores = of_pairing()["data"]["value_scores"].isel(pos=-1)
    groups = xr.DataArray(
        np.ones((1, 60), bool), dims=("group", "example"), coords={"group": ["all"]}
    )
    result = probes.summarise_value_scores(value_scores, groups)
    result = result.expand_dims(layer=[0], token=["all"])
    pattern = signs["pattern"].isel(layer=0)
    names = {"columns": columns, "data": signs["captured"], "pattern": pattern, "result": result}
    return names | {"tokens": None}


BY_MODULE = {
    "mechanisms": of_mechanisms,
    "mechanisms.modular": of_modular,
    "mechanisms.porting.compositional_attention": cache(published.of_compositional_attention),
    "mechanisms.porting.hypernetwork_attention": cache(published.of_hypernetwork_attention),
    "mechanisms.porting.neural_data_router": cache(published.of_neural_data_router),
    "mechanisms.randomness": of_randomness,
    "tasks": of_tasks,
    "tasks.expressions": of_expressions,
    "tasks.algolisp.problems": data_sets.of_programs,
    "tasks.stored.classification": data_sets.of_texts,
    "tasks.stored.pairs": lambda: of_ranking() | data_sets.of_pairs(),
    "tasks.stored.questions": data_sets.of_questions,
    "tasks.stored.sequences": data_sets.of_programs,
    "probes.capturing": of_capturing,
    "probes.context": of_windows,
    "probes.decoding": of_decoding,
    "probes.interventions": of_interventions,
    "probes.interventions.alignment": of_alignment,
    "probes.interventions.attribution": of_attribution,
    "probes.interventions.edge_patching": of_attribution,
    "probes.interventions.faithfulness": of_attribution,
    "probes.interventions.latent_codes": of_latent_codes,
    "probes.interventions.patching_results": of_attribution,
    "probes.interventions.swaps": of_swaps,
    "probes.control_flow": of_control_flow,
    "probes.loops": of_loops,
    "probes.loops.nudges": of_nudges,
    "probes.oracle": of_oracle,
    "probes.specialization": of_specialization,
    "probes.pairing": of_pairing,
    "probes.signedness": of_signedness,
    "probes.signedness.capture": of_places,
    "probes.statistics.grouping": of_grouping,
    "probes.pointing": of_pointing,
    "probes.plots.alignments": of_subspaces,
    "probes.plots.curves": of_curves,
    "probes.plots.decoders": of_decoders,
    "probes.plots.graphs": of_control_flow,
    "probes.plots.looped": of_loops,
    "probes.plots.matrices": of_matrices,
    "probes.plots.modules": of_specialization,
    "probes.plots.points": of_decoding,
    "probes.plots.rates": of_rates,
    "probes.plots.retrievals": of_pairing,
    "probes.plots.signs": of_signedness,
}
"""A part of the name of modules, and what makes the further names of their examples."""
