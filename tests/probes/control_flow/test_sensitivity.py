import numpy as np
import pytest

from probes import extract_control_flow, score_control_flow, sweep_thresholds
from tests.probes.control_flow.programs import make_programs

GATES, WEIGHTS = [0.02, 0.5, 0.99], [0.05, 0.5]


@pytest.fixture(scope="module")
def programs():
    return make_programs(40)


@pytest.fixture(scope="module")
def arrays(programs):
    rng = np.random.default_rng(0)
    return programs.gates(rng), programs.attention(rng), programs.valid


@pytest.fixture(scope="module")
def result(programs, arrays):
    thresholds = {"gate_thresholds": GATES, "attention_thresholds": WEIGHTS}
    return sweep_thresholds(*arrays, programs.truth, **thresholds, resamples=50)


def test_each_pair_of_thresholds_is_scored_as_by_itself(programs, arrays, result):
    assert result["score"].sizes["gate_threshold"] == len(GATES)
    assert result["gate_threshold"].to_numpy().tolist() == GATES
    assert result["attention_threshold"].to_numpy().tolist() == WEIGHTS
    for gate in GATES:
        for weight in WEIGHTS:
            graphs = extract_control_flow(*arrays, gate_threshold=gate, attention_threshold=weight)
            alone = score_control_flow(graphs, programs.truth, resamples=50)
            here = result.sel(gate_threshold=gate, attention_threshold=weight)
            for name in ("score", "score_low", "above_chance", "above_habit_high"):
                np.testing.assert_array_equal(here[name], alone[name])
            assert here["nodes"] == graphs["update"].sum() / 40
            assert here["reads"] == (graphs["kind"] == "attention").sum() / 40
    assert all(result[name].attrs["long_name"] for name in ("score", "nodes", "reads"))
    assert result.attrs["habit"] == "both neighbours"


def test_wrong_thresholds_are_seen_in_the_score(result):
    f1 = result["score"].sel(control="trained", metric="f1")
    assert f1.sel(gate_threshold=0.5, attention_threshold=0.5) == 1
    # Noise is read as well, or updates are missed.
    assert f1.sel(gate_threshold=0.5, attention_threshold=0.05) < 0.7
    assert f1.sel(gate_threshold=0.99, attention_threshold=0.5) < 0.5
    assert (result["nodes"].diff("gate_threshold") < 0).all()
    assert (result["reads"].diff("attention_threshold") < 0).all()
    # A model-free null does not depend on thresholds.
    null = result["score"].sel(control="left neighbour", metric="f1")
    assert np.ptp(null.to_numpy()) == 0


def test_invalid_input_is_refused(programs, arrays):
    with pytest.raises(ValueError, match="must name at least one threshold each, got \\[\\]"):
        sweep_thresholds(*arrays, programs.truth, gate_thresholds=[], attention_thresholds=WEIGHTS)
