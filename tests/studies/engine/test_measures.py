import dataclasses

import cloudpickle
import numpy as np
import pytest
import xarray as xr

from studies.engine import SchemaError, Trained, settings
from studies.engine.cells import Cell
from studies.engine.fingerprints import code_of
from studies.engine.measures import configured
from tests.studies.engine.toy import TOY, only_mlp


def counting(trained: Trained, n: int = 20, parts: tuple[int, ...] = (1, 2)):
    """Return the arguments.

    Args:
        n: number of examples,
            or fewer.
        parts: numbers of the parts.
    """
    return trained, n, parts


def without_annotations(trained, n=20):
    return n


def without_a_default(trained: Trained, n: int, share: float = 0.5):
    return n, share


def without_settings(trained: Trained):
    """Return the model."""
    return trained


def test_parameters_after_the_model_become_settings():
    measure = configured(counting)
    assert settings.describe(measure) == [
        ("n", 20, "number of examples, or fewer."),
        ("parts", (1, 2), "numbers of the parts."),
    ]
    assert settings.parse(measure, "parts", "3,4") == ((3, 4),)
    assert measure("model") == ("model", 20, (1, 2))
    changed = settings.put(measure, {"n": 3, "parts": (5,)})
    assert changed("model") == ("model", 3, (5,))
    assert settings.plain(changed) == {"class": "counting", "n": 3, "parts": [5]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        measure.n = 4


def test_without_annotations_settings_have_the_types_of_their_defaults():
    measure = configured(without_annotations)
    assert settings.parse(measure, "n", "3") == (3,)
    with pytest.raises(ValueError, match="n must be of type int, got 'x'"):
        settings.parse(measure, "n", "x")


def test_a_setting_without_a_default_is_refused():
    message = "all settings of measure without_a_default must have defaults, got n without"
    with pytest.raises(TypeError, match=message):
        configured(without_a_default)


def test_a_configured_measure_has_the_code_of_its_function_and_can_be_sent_to_workers():
    assert code_of(configured(counting)) == code_of(counting)
    assert code_of(counting) != code_of(configured(without_settings))
    sent = cloudpickle.loads(cloudpickle.dumps(settings.put(configured(counting), {"n": 7})))
    assert sent("model") == ("model", 7, (1, 2))


def test_measures_without_settings_and_configured_ones_are_returned_as_they_are():
    for measure in (without_settings, configured(counting), len):
        assert configured(measure) is measure


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a trained cell."""
    root = tmp_path_factory.mktemp("runs")
    Cell(TOY.setup, root=root).train()
    return root


def array(values, dims=(), coords=None, **attrs):
    attrs = {"long_name": "what is measured"} | attrs
    data = xr.Dataset({"z": (dims, values, attrs)}, coords)
    return lambda trained: data


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (array(1.0, long_name=""), "z has no long_name"),
        (
            array([1.0, 2.0], "layer", {"layer": ["a", "a"]}),
            r"labels of layer must .* \['a', 'a'\]",
        ),
        (array([1.0, 2.0], "cell"), "dim cell is that of models"),
        (array([1.0, 2.0], "thing"), "dim thing is not in the schema and has no coordinate"),
        (array(1.0, coords={"width": 2}), "must not have names of axes, got width"),
        (array(np.fft.fft([1.0, 2.0]), "feature"), "what no file can hold: complex"),
        (array(np.ones(2, np.float16), "feature"), "what no file can hold: .* got float16"),
        (array(1.0, normed=True), "what no file can hold: .* attribute"),
        (lambda trained: xr.DataTree.from_dict({"/a": array(1.0, long_name="")(0)}), "long_name"),
    ],
)
def test_a_measure_that_does_not_follow_the_schema_is_named_when_it_is_taken(
    root, measure, message
):
    cell = Cell(TOY.setup, root=root, measures={"mine": measure}, axes=("width",))
    with pytest.raises(SchemaError, match=f"measure 'mine'.*{message}"):
        cell.measure()
    assert not cell.has("mine")


def late(trained):
    return None if trained.step < 20 else only_mlp(trained)


def early(trained):
    return None if trained.step > 20 else only_mlp(trained)


def other_sizes(trained):
    return array(np.ones(trained.step), "feature")(trained)


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (late, "at all checkpoints along training or at none, got None at steps 10 of 10, 30"),
        (early, "at all checkpoints along training or at none, got None at steps 30 of 10, 30"),
        (other_sizes, "along training: .*conflicting dimension sizes"),
    ],
)
def test_a_measure_along_training_that_is_not_of_one_kind_is_named(root, measure, message):
    cell = Cell(TOY.setup, root=root, measures={"mine": measure}, along=("mine",))
    with pytest.raises(SchemaError, match=f"measure 'mine'.*{message}"):
        cell.measure()
