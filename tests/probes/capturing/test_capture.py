import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from probes import Quantity, capture

PATTERN = Quantity(
    "blocks.*.attn.hook_pattern", ("example", "head", "query_pos", "key_pos"), long_name="pattern"
)


def test_equals_run_with_cache(toy_model, make_batches):
    model, batches = toy_model().eval(), make_batches(3)
    result = capture(
        model,
        batches,
        {
            "pattern": PATTERN,
            "code": Quantity(
                "blocks.*.attn.hook_pattern", ("example", "head"), lambda a: a[:, :, -1, 0]
            ),
            "resid": Quantity("blocks.1.hook_resid_post", ("example", "pos", "feature")),
            "prediction": Quantity(None, ("example", "pos"), lambda output: output.argmax(-1)),
        },
        latent_dims={"rule": ("example", "feature_id")},
    )
    inputs = torch.cat([batch.inputs for batch in batches])
    with torch.no_grad():
        output, cache = model.run_with_cache(inputs)
    assert result["pattern"].dims == ("example", "layer", "head", "query_pos", "key_pos")
    assert result["layer"].to_numpy().tolist() == [0, 1]
    for layer in range(2):
        expected = cache[f"blocks.{layer}.attn.hook_pattern"].numpy()
        np.testing.assert_allclose(result["pattern"].sel(layer=layer), expected, atol=1e-6)
        np.testing.assert_allclose(
            result["code"].sel(layer=layer), expected[:, :, -1, 0], atol=1e-6
        )
    np.testing.assert_allclose(
        result["resid"], cache["blocks.1.hook_resid_post"].numpy(), atol=1e-6
    )
    assert result["resid"].dims == ("example", "pos", "feature")
    assert (result["prediction"].to_numpy() == output.argmax(-1).numpy()).all()
    # Latents keep the order of the batches.
    assert result["index"].to_numpy().tolist() == list(range(15))
    rules = torch.cat([batch.latents["rule"] for batch in batches]).numpy()
    assert (result["rule"].to_numpy() == rules).all()
    assert result["rule"].dims == ("example", "feature_id")
    assert result["code"].dtype == np.float32
    assert all(variable.attrs["long_name"] for variable in result.data_vars.values())
    assert result["pattern"].attrs["long_name"] == "pattern"


def test_layers_are_in_numeric_order(toy_model, make_batches):
    model = toy_model(12).eval()
    result = capture(model, make_batches(1), {"pattern": PATTERN})
    assert result["layer"].to_numpy().tolist() == list(range(12))
    _, cache = model.run_with_cache(make_batches(1)[0].inputs)
    for layer in (2, 9, 10, 11):
        np.testing.assert_allclose(
            result["pattern"].sel(layer=layer),
            cache[f"blocks.{layer}.attn.hook_pattern"].detach().numpy(),
            atol=1e-6,
        )


def test_unnamed_latent_dims_get_names(toy_model, make_batches):
    result = capture(toy_model(), make_batches(1), {"pattern": PATTERN})
    assert result["rule"].dims == ("example", "rule_1")


def test_kept_values_are_copies(toy_model, make_batches):
    model, batches = toy_model().eval(), make_batches(1)
    overwritten = []

    def overwrite(activation, hook):
        overwritten.append(hook.name)
        return activation.mul_(0)

    # The capture's hook sees the activation first; a later hook writes into the same storage.
    quantity = Quantity("blocks.0.attn.hook_pattern", PATTERN.dims, lambda a: a[:, :1])
    expected = capture(model, batches, {"pattern": quantity})["pattern"].to_numpy().copy()
    capture_hooks = model.hooks

    def hooks(fwd_hooks):
        return capture_hooks(fwd_hooks=[*fwd_hooks, ("blocks.0.attn.hook_pattern", overwrite)])

    model.hooks = hooks
    result = capture(model, batches, {"pattern": quantity})
    assert overwritten
    np.testing.assert_array_equal(result["pattern"], expected)
    # Nor do later changes of the latents matter.
    batches[0].latents["index"].fill_(-1)
    assert result["index"].to_numpy().tolist() == [0, 1, 2, 3, 4]


def test_activations_that_are_not_kept_are_freed(toy_model, make_batches):
    references = []

    def reduce(activation):
        references.append(weakref.ref(activation))
        return activation[:, :, 0, 0]

    alive = []

    def batches():
        for batch in make_batches(3):
            gc.collect()
            alive.append(sum(reference() is not None for reference in references))
            yield batch

    capture(
        toy_model(),
        batches(),
        {"code": Quantity("blocks.*.attn.hook_pattern", ("example", "head"), reduce)},
    )
    assert len(references) == 6
    assert alive == [0] * 3


def test_hooks_and_flags_are_restored_after_an_error(toy_model, make_batches):
    model = toy_model().train()
    calls = []
    model.add_hook("hook_unused", lambda activation, hook: calls.append(1))

    def fail(activation):
        raise ArithmeticError("in the reduction")

    with pytest.raises(ArithmeticError, match="in the reduction"):
        capture(
            model,
            make_batches(1),
            {"code": Quantity("blocks.*.hook_resid_post", ("example",), fail)},
        )
    # The caller's own hook stays, ours are gone.
    assert list(model.list_hooks()) == ["hook_unused"]
    assert model.training
    assert model.blocks[0].dropout.training


def test_runs_in_evaluation_mode(toy_model, make_batches):
    model = toy_model().train()
    quantity = {"resid": Quantity("blocks.1.hook_resid_post", ("example", "pos", "feature"))}
    first, second = (capture(model, make_batches(1), quantity) for _ in range(2))
    assert first.identical(second)  # dropout would differ
    assert model.training


def test_works_on_a_bridge(bridge):
    tokens = torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(0))
    batches = [SimpleNamespace(inputs=part, latents={"tokens": part}) for part in tokens.split(2)]
    result = capture(
        bridge,
        batches,
        {
            "pattern": PATTERN,
            "z": Quantity("blocks.*.attn.hook_z", ("example", "pos", "head", "d_head")),
            "next": Quantity(None, ("example",), lambda logits: logits[:, -1].argmax(-1)),
        },
    )
    logits, cache = bridge.run_with_cache(tokens)
    for layer in range(2):
        for name in ("pattern", "z"):
            np.testing.assert_allclose(
                result[name].sel(layer=layer),
                cache[f"blocks.{layer}.attn.hook_{name}"].detach().numpy(),
                atol=1e-6,
            )
    assert (result["next"].to_numpy() == logits[:, -1].argmax(-1).numpy()).all()
    assert not bridge.list_hooks()


def test_inputs_may_be_arguments_or_keywords(toy_model, make_batches):
    model = toy_model()
    batch = make_batches(1)[0]
    quantity = {"pattern": PATTERN}
    plain = capture(model, [batch], quantity)
    for inputs in ((batch.inputs,), {"x": batch.inputs}):
        other = SimpleNamespace(inputs=inputs, latents=batch.latents)
        assert capture(model, [other], quantity).identical(plain)


def test_half_precision_becomes_float32(toy_model, make_batches):
    quantity = Quantity("blocks.0.hook_resid_post", ("example",), lambda a: a.bfloat16()[:, 0, 0])
    assert capture(toy_model(), make_batches(1), {"x": quantity})["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("quantity", "error", "message"),
    [
        (Quantity("blocks.0.hook_resid_post", ("example", "pos")), ValueError, r"\(5, 4, 8\)"),
        (Quantity(None, ("example",)), ValueError, "model's output"),
        (Quantity("hook_unused", ("example",)), RuntimeError, "must fire.*hook_unused"),
        (Quantity("blocks.7.hook_resid_post", ("example",)), KeyError, r"blocks\.1\.hook_resid_p"),
        (
            Quantity("blocks.0.hook_resid_post", ("example",), lambda a: a[:2, 0, 0]),
            ValueError,
            "examples of the batch",
        ),
        (
            Quantity("blocks.0.hook_resid_post", ("example",), lambda a: 3.0),
            ValueError,
            "got float from",
        ),
    ],
)
def test_invalid_quantities_are_refused(toy_model, make_batches, quantity, error, message):
    with pytest.raises(error, match=message):
        capture(toy_model(), make_batches(1), {"x": quantity})


def test_dims_of_latents_that_no_batch_has_are_refused(toy_model, make_batches):
    model, passes = toy_model(), []
    model.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    dims = {"rule": ("example", "feature"), "ruel": ("example",)}
    with pytest.raises(
        KeyError, match=r"latent_dims must name latents of the batches, which are .*rule, got ruel"
    ):
        capture(model, make_batches(2), {"p": PATTERN}, latent_dims=dims)
    assert not passes


def test_invalid_input_is_refused(toy_model, make_batches):
    model = toy_model()
    with pytest.raises(ValueError, match="at least one batch"):
        capture(model, [], {"pattern": PATTERN})
    with pytest.raises(ValueError, match="at least one quantity"):
        capture(model, make_batches(1), {})
    with pytest.raises(ValueError, match="'rule'"):
        capture(model, make_batches(1), {"rule": PATTERN})
    with pytest.raises(ValueError, match="latent_dims"):
        capture(model, make_batches(1), {"p": PATTERN}, latent_dims={"rule": ("example",)})
    with pytest.raises(ValueError, match="must have one shape in all batches"):
        capture(model, [*make_batches(1), *make_batches(1, pos=3)], {"p": PATTERN})
    with pytest.raises(ValueError, match="begin with 'example'"):
        Quantity("hook", ("pos",))
    with pytest.raises(ValueError, match="must not name 'layer'"):
        Quantity("blocks.*.hook", ("example", "layer"))
    with pytest.raises(ValueError, match="eager model"):
        capture(torch.compile(model), make_batches(1), {"p": PATTERN})


@pytest.mark.parametrize("file", [None, "capture.zarr"])
@pytest.mark.parametrize(
    ("changes", "quantities", "message"),
    [
        ({"layer": torch.arange(5)}, {"pattern": PATTERN}, r"dim, .* are .*layer.*, got layer"),
        ({"head": torch.arange(5)}, {"pattern": PATTERN}, "got head"),
        ({"example": torch.arange(5)}, {"pattern": PATTERN}, "got example"),
        ({"rule_1": torch.arange(5)}, {"pattern": PATTERN}, "got rule_1"),
        ({}, {"head": PATTERN}, "got head"),
        ({}, {"layer": PATTERN}, "got layer"),
        (
            {"n_query_pos": torch.arange(5)},
            {"p": replace(PATTERN, ragged=("query_pos",))},
            "got n_query_pos",
        ),
        (
            {"step": torch.arange(5)},
            {"p": Quantity("blocks.0.hook_resid_post", ("example", "pos", "d"), fires="each")},
            "got step",
        ),
    ],
)
def test_names_of_dims_and_coordinates_are_refused(
    toy_model, make_batches, tmp_path, file, changes, quantities, message
):
    batch = make_batches(1)[0]
    batch.latents.update(changes)
    with pytest.raises(ValueError, match=message):
        capture(toy_model(), [batch], quantities, to=file and tmp_path / file)


@pytest.mark.parametrize("file", [None, "capture.zarr"])
def test_what_does_not_fit_is_named(toy_model, make_batches, tmp_path, file):
    to, model = file and tmp_path / file, toy_model()
    shared = {"rule": ("example", "head")}
    with pytest.raises(ValueError, match=r"latent 'rule' must have the size 2 of dim 'head', .* 3"):
        capture(model, make_batches(1), {"pattern": PATTERN}, latent_dims=shared, to=to)
    resid = Quantity("blocks.0.hook_resid_post", ("example", "pos", "head"))
    with pytest.raises(ValueError, match="quantity 'resid' must have the size 2 of dim"):
        capture(model, make_batches(1), {"pattern": PATTERN, "resid": resid}, to=to)
    first, second = make_batches(2)
    second.latents["rule"] = second.latents["rule"][:, :1]
    with pytest.raises(ValueError, match=r"latent 'rule' must .* got \(3,\) and \(1,\)"):
        capture(model, [first, second], {"pattern": PATTERN}, to=to)


def test_a_batch_without_examples_is_refused(toy_model, make_batches):
    batch = make_batches(1)[0]
    empty = SimpleNamespace(
        inputs=batch.inputs[:0], latents={name: of[:0] for name, of in batch.latents.items()}
    )
    for batches in ([empty], [batch, empty]):
        with pytest.raises(ValueError, match="batches must have at least one example each"):
            capture(toy_model(), batches, {"pattern": PATTERN})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_of_half_precision_become_float32(toy_model, make_batches, dtype):
    batch = make_batches(1)[0]
    batch.latents["value"] = torch.arange(5).to(dtype) / 4
    result = capture(toy_model(), [batch], {"pattern": PATTERN})
    assert result["value"].dtype == np.float32
    assert result["value"].to_numpy().tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_buffers_grow(toy_model, make_batches, monkeypatch):
    expected = capture(toy_model(), make_batches(9), {"pattern": PATTERN})
    monkeypatch.setattr("probes.capturing.capture._Rows._FIRST_BYTES", 1)
    assert capture(toy_model(), make_batches(9), {"pattern": PATTERN}).identical(expected)


def test_latents_may_be_in_a_buffer_that_is_filled_again(toy_model, make_batches):
    labels = torch.zeros(5, dtype=torch.long)

    def batches():
        for number, batch in enumerate(make_batches(3)):
            yield SimpleNamespace(inputs=batch.inputs, latents={"label": labels.fill_(number)})

    result = capture(toy_model(), batches(), {"pattern": PATTERN})
    assert result["label"].to_numpy().tolist() == [0] * 5 + [1] * 5 + [2] * 5
