import dataclasses

import cloudpickle
import pytest

from studies.engine import Trained, settings
from studies.engine.fingerprints import code_of
from studies.engine.measures import configured


def counting(trained: Trained, n: int = 20, parts: tuple[int, ...] = (1, 2)):
    """Tell what it is given.

    Args:
        n: examples,
            or fewer.
        parts: of them.
    """
    return trained, n, parts


def bare(trained, n=20):
    return n


def lacking(trained: Trained, n: int, share: float = 0.5):
    return n, share


def plain(trained: Trained):
    """Take no settings."""
    return trained


def test_what_a_function_takes_beside_a_model_are_settings():
    measure = configured(counting)
    assert settings.describe(measure) == [
        ("n", 20, "examples, or fewer."),
        ("parts", (1, 2), "of them."),
    ]
    assert settings.parse(measure, "parts", "3,4") == ((3, 4),)
    assert measure("model") == ("model", 20, (1, 2))
    changed = settings.put(measure, {"n": 3, "parts": (5,)})
    assert changed("model") == ("model", 3, (5,))
    assert settings.plain(changed) == {"class": "counting", "n": 3, "parts": [5]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        measure.n = 4


def test_without_annotations_settings_are_of_the_type_of_their_defaults():
    assert settings.parse(configured(bare), "n", "3") == (3,)
    with pytest.raises(ValueError, match="n must be of type int, got 'x'"):
        settings.parse(configured(bare), "n", "x")


def test_a_setting_without_a_default_is_refused():
    with pytest.raises(TypeError, match="the measure lacking must have defaults of n: what"):
        configured(lacking)


def test_its_code_is_that_of_the_function_and_it_can_be_sent_to_workers():
    assert code_of(configured(counting)) == code_of(counting) != code_of(configured(plain))
    sent = cloudpickle.loads(cloudpickle.dumps(settings.put(configured(counting), {"n": 7})))
    assert sent("model") == ("model", 7, (1, 2))


def test_what_has_no_settings_or_has_them_already_stays_as_it_is():
    measure = configured(counting)
    for one in (plain, measure, len):
        assert configured(one) is one
