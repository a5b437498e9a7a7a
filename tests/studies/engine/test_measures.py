import dataclasses

import cloudpickle
import pytest

from studies.engine import Trained, settings
from studies.engine.fingerprints import code_of
from studies.engine.measures import configured


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
