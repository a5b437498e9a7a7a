import numpy as np
import pytest
import torch
import xarray as xr

import mechanisms
import probes
from tasks import Batch

BEGIN, END, PADDING = 7, 8, 0


def make_model():
    config = mechanisms.EncoderDecoderConfig(
        d_input=9,
        d_output=9,
        d_model=8,
        n_layers=2,
        attention=mechanisms.CodaAttentionConfig(n_heads=2, d_head=4),
        feed_forward=mechanisms.FeedForwardConfig(d_mlp=8),
        begin=BEGIN,
        end=END,
        padding=PADDING,
        shared=False,
    )
    return mechanisms.EncoderDecoder(config, generator=torch.Generator().manual_seed(0)).eval()


def make_batch():
    """Draw ten sequences of up to six tokens, with targets of three."""
    generator = torch.Generator().manual_seed(1)
    line = torch.randint(1, 7, (10, 6), generator=generator)
    line[torch.arange(6) >= torch.randint(2, 7, (10, 1), generator=generator)] = PADDING
    target = torch.randint(1, 7, (10, 3), generator=generator)
    return Batch(
        (line, target), target, torch.ones(10, 3, dtype=torch.bool), {"number": line[:, 0]}
    )


def places_of(batch):
    real, n = batch.inputs[0] != PADDING, len(batch)
    all_queries = torch.ones(n, 3, 1, dtype=torch.bool)
    return {
        "reads": probes.AttentionPlace("encoder_blocks.*.attn.", real[:, :, None] & real[:, None]),
        "asks": probes.AttentionPlace(
            "decoder_blocks.1.cross_attn.",
            all_queries & real[:, None],
            (batch.inputs[0][:, None] % 3 - 1).expand(n, 3, 6),
        ),
    }


@pytest.fixture(scope="module")
def captured():
    model, batch = make_model(), make_batch()
    places = places_of(batch)
    data = probes.capture_places(model, batch.parts(4), places, ["pattern", "gate"])
    return data, model.run_with_cache(*batch.inputs)[1], places


def test_hooks_are_captured_in_all_layers_of_every_module(captured):
    data, cache, _ = captured
    for hook in ("pattern", "gate"):
        for layer in (0, 1):
            expected = cache[f"encoder_blocks.{layer}.attn.hook_{hook}"]
            actual = data["reads"][hook].sel(layer=layer).transpose("example", "head", ...)
            np.testing.assert_allclose(actual, expected, atol=1e-6)
        actual = data["asks"][hook].transpose("layer", "example", "head", ...)
        expected = cache[f"decoder_blocks.1.cross_attn.hook_{hook}"]
        np.testing.assert_allclose(actual[0], expected, atol=1e-6)
    assert data["asks"]["layer"].to_numpy().tolist() == [0]
    assert data["asks"]["head"].to_numpy().tolist() == [0, 1]


def test_valid_pairs_and_signs_are_kept(captured):
    data, _, places = captured
    for name, place in places.items():
        assert data[name]["valid"].dims == ("example", "query_pos", "key_pos")
        np.testing.assert_array_equal(data[name]["valid"], place.valid)
    assert "sign" not in data["reads"]
    np.testing.assert_array_equal(data["asks"]["sign"], places["asks"].sign)


def test_scores_of_all_modules_are_in_one_dataset(captured):
    data, _, places = captured
    scores = probes.score_places(
        make_model(),
        make_batch().parts(4),
        places,
        ["pattern"],
        lambda reads: probes.score_signedness(reads["pattern"], valid=reads["valid"], resamples=5),
    )
    assert scores["place"].to_numpy().tolist() == ["reads", "asks"]
    assert scores["share"].dims == ("place", "layer", "head", "kind")
    reads = data["reads"]
    expected = probes.score_signedness(reads["pattern"], valid=reads["valid"], resamples=5)
    xr.testing.assert_allclose(scores["share"].sel(place="reads", drop=True), expected["share"])
    # The other module has one layer.
    assert scores["share"].sel(place="asks", layer=1).isnull().all()
    assert scores["share"].sel(place="asks", layer=0).notnull().all()


def test_all_models_are_scored_on_the_same_examples():
    batch = make_batch()
    halves = {"id": batch[:6], "ood": batch[6:]}
    examples = {split: ([half], places_of(half)) for split, half in halves.items()}
    first, other = make_model(), make_model()
    with torch.no_grad():
        for weights in other.parameters():
            weights *= 3

    def score(data):
        return probes.score_signedness(data["pattern"], valid=data["valid"], resamples=5)

    scores = probes.examine_places({"a": first, "b": other}, examples, ["pattern"], score)
    assert scores["share"].dims == ("model", "split", "place", "layer", "head", "kind")
    assert scores["model"].to_numpy().tolist() == ["a", "b"]
    for name, model in (("a", first), ("b", other)):
        for split, batches_and_places in examples.items():
            actual = scores.sel(model=name, split=split, drop=True)
            expected = probes.score_places(model, *batches_and_places, ["pattern"], score)
            xr.testing.assert_allclose(actual["distribution"], expected["distribution"])
    assert abs(scores["added"].diff("model")).max() > 0.1
    with pytest.raises(ValueError, match="models and examples must not be empty"):
        probes.examine_places({}, examples, ["pattern"], score)


def test_invalid_input_is_refused():
    model, batch = make_model(), make_batch()
    place = places_of(batch)["reads"]
    with pytest.raises(KeyError, match=r"hook_signs"):
        probes.capture_places(model, [batch], {"reads": place}, ["signs"])
    with pytest.raises(ValueError, match=r"valid must have 5 examples.*reads"):
        probes.capture_places(model, [batch[:5]], {"reads": place}, ["pattern"])
    with pytest.raises(ValueError, match="places must name at least one place, got none"):
        probes.score_places(model, [batch], {}, ["pattern"], lambda data: data)
