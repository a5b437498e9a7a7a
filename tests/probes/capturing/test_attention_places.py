import numpy as np
import pytest
import torch
import xarray as xr

import mechanisms
import probes
from tasks import Batch

BEGIN, END, PADDING = 7, 8, 0


def reader_and_writer():
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


def drawn():
    """Ten lines of up to six tokens, and what is written."""
    generator = torch.Generator().manual_seed(1)
    line = torch.randint(1, 7, (10, 6), generator=generator)
    line[torch.arange(6) >= torch.randint(2, 7, (10, 1), generator=generator)] = PADDING
    given = torch.randint(1, 7, (10, 3), generator=generator)
    return Batch((line, given), given, torch.ones(10, 3, dtype=torch.bool), {"number": line[:, 0]})


def places_of(batch):
    real, n = batch.inputs[0] != PADDING, len(batch)
    asked = torch.ones(n, 3, 1, dtype=torch.bool)
    return {
        "reads": probes.AttentionPlace("encoder_blocks.*.attn.", real[:, :, None] & real[:, None]),
        "asks": probes.AttentionPlace(
            "decoder_blocks.1.cross_attn.",
            asked & real[:, None],
            (batch.inputs[0][:, None] % 3 - 1).expand(n, 3, 6),
        ),
    }


@pytest.fixture(scope="module")
def captured():
    model, batch = reader_and_writer(), drawn()
    places = places_of(batch)
    found = probes.capture_places(model, batch.parts(4), places, ["pattern", "gate"])
    return found, model.run_with_cache(*batch.inputs)[1], places


def test_every_place_shows_its_hooks_in_all_layers(captured):
    found, cache, _ = captured
    for hook in ("pattern", "gate"):
        for layer in (0, 1):
            seen = cache[f"encoder_blocks.{layer}.attn.hook_{hook}"]
            one = found["reads"][hook].sel(layer=layer).transpose("example", "head", ...)
            np.testing.assert_allclose(one, seen, atol=1e-6)
        one = found["asks"][hook].transpose("layer", "example", "head", ...)
        seen = cache[f"decoder_blocks.1.cross_attn.hook_{hook}"]
        np.testing.assert_allclose(one[0], seen, atol=1e-6)
    assert found["asks"]["layer"].to_numpy().tolist() == [0]
    assert found["asks"]["head"].to_numpy().tolist() == [0, 1]


def test_the_pairs_that_count_stand_beside(captured):
    found, _, places = captured
    for name, place in places.items():
        assert found[name]["valid"].dims == ("example", "query_pos", "key_pos")
        np.testing.assert_array_equal(found[name]["valid"], place.valid)
    assert "sign" not in found["reads"]
    np.testing.assert_array_equal(found["asks"]["sign"], places["asks"].sign)


def test_scores_of_places_stand_in_one_dataset(captured):
    found, _, places = captured
    scores = probes.score_places(
        reader_and_writer(),
        drawn().parts(4),
        places,
        ["pattern"],
        lambda data: probes.score_signedness(data["pattern"], valid=data["valid"], resamples=5),
    )
    assert scores["place"].to_numpy().tolist() == ["reads", "asks"]
    assert scores["share"].dims == ("place", "layer", "head", "kind")
    data = found["reads"]
    alone = probes.score_signedness(data["pattern"], valid=data["valid"], resamples=5)
    xr.testing.assert_allclose(scores["share"].sel(place="reads", drop=True), alone["share"])
    # The other place has one layer.
    assert scores["share"].sel(place="asks", layer=1).isnull().all()
    assert scores["share"].sel(place="asks", layer=0).notnull().all()


def test_models_are_examined_on_the_same_examples_of_every_split():
    batch = drawn()
    halves = {"id": batch[:6], "ood": batch[6:]}
    examples = {split: ([half], places_of(half)) for split, half in halves.items()}
    first, other = reader_and_writer(), reader_and_writer()
    with torch.no_grad():
        for weights in other.parameters():
            weights *= 3

    def score(data):
        return probes.score_signedness(data["pattern"], valid=data["valid"], resamples=5)

    found = probes.examine_places({"a": first, "b": other}, examples, ["pattern"], score)
    assert found["share"].dims == ("model", "split", "place", "layer", "head", "kind")
    assert found["model"].to_numpy().tolist() == ["a", "b"]
    for name, model in (("a", first), ("b", other)):
        for split, given in examples.items():
            one = found["distribution"].sel(model=name, split=split, drop=True)
            alone = probes.score_places(model, *given, ["pattern"], score)["distribution"]
            xr.testing.assert_allclose(one, alone)
    assert abs(found["added"].diff("model")).max() > 0.1
    with pytest.raises(ValueError, match="models and examples must not be empty"):
        probes.examine_places({}, examples, ["pattern"], score)


def test_bad_input_is_named():
    model, batch = reader_and_writer(), drawn()
    place = places_of(batch)["reads"]
    with pytest.raises(KeyError, match=r"hook_signs"):
        probes.capture_places(model, [batch], {"reads": place}, ["signs"])
    with pytest.raises(ValueError, match=r"valid must be of 5 examples.*reads"):
        probes.capture_places(model, [batch[:5]], {"reads": place}, ["pattern"])
    with pytest.raises(ValueError, match="places must name at least one place, got none"):
        probes.score_places(model, [batch], {}, ["pattern"], lambda data: data)
