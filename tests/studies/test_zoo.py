"""The trained models that come with the package."""

import json

import pytest

from mechanisms import model_zoo
from studies.engine import Study, settings, zoo
from studies.zoo import all_studies

RECORDS = model_zoo.records()
STUDIES = all_studies()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_a_model_has_the_scores_of_its_record(name):
    zoo.verify(name, STUDIES[RECORDS[name]["study"]])


def test_models_are_small_and_named_alike():
    sizes = {path: path.stat().st_size for path in model_zoo.FOLDER.glob("*")}
    assert sum(sizes.values()) <= 75e6
    assert max(sizes.values(), default=0) <= 3e6
    assert {path.suffix for path in sizes} <= {".safetensors", ".json"}
    assert {path.stem for path in sizes if path.suffix == ".safetensors"} == set(RECORDS)
    assert sum(len(zoo.names_by_identity(study)) for study in STUDIES.values()) == len(RECORDS)
    for name, record in RECORDS.items():
        assert name.endswith(f"-seed{record['config']['seed']}")


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_setups_are_read_from_the_settings_of_a_record(study: Study):
    own = [name for name, preset in study.presets.items() if preset.setup is not None]
    for preset in dict.fromkeys(["laptop", "smoke", *own]):
        cells = study.plan(preset).cells
        for setup in (cells[0], cells[-1]):
            config = json.loads(json.dumps(settings.plain(setup)))
            assert zoo.setup_of(config, study) == setup
