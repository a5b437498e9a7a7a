import numpy as np
import pytest
import xarray as xr

from probes import ordered_activation, score_specialization

OPERATIONS = ("add", "sine", "square")


def scored(sent, *, modules=6, examples=60, layers=1):
    """Scores of networks that send each operation to a module, the same in all layers."""
    operation = np.arange(examples) % len(sent)
    routing = np.repeat(np.eye(modules)[np.array(sent)[operation]][:, None], layers, axis=1)
    return score_specialization(
        xr.DataArray(routing, dims=("example", "layer", "module")),
        xr.DataArray(operation, dims=("example",)),
        operations=OPERATIONS,
        resamples=2,
    )


def test_a_specialized_network_shows_a_diagonal_whatever_its_modules_numbers():
    """Operations go to modules 1, 2, 0 in one network, 4, 3, 2 in another."""
    networks = [scored([1, 2, 0], modules=5, layers=2), scored([4, 3, 2], modules=5, layers=2)]
    both = xr.concat(networks, "network")
    ordered = ordered_activation(both)
    assert ordered.sizes["layer"] == 3
    for one in ordered.stack(matrix=("network", "layer")).transpose("matrix", ...):
        assert np.allclose(one.transpose("operation", "module"), np.eye(3, 5))
    # What it was made of is as it was.
    assert both["activation"].sel(operation="add").isel(network=0, layer=0).argmax("module") == 1


@pytest.mark.parametrize("labels", [[1, 2, 3, 4, 5, 6], [5, 4, 3, 2, 1, 0], list("abcdef")])
def test_labels_of_modules_do_not_matter(labels):
    scores = scored([1, 2, 0])
    ordered = ordered_activation(scores.assign_coords(module=labels))
    assert ordered.equals(ordered_activation(scores))


def test_modules_without_an_operation_come_last_the_busiest_first():
    shares = [[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]]
    scores = xr.Dataset(
        {
            "activation": (("operation", "module"), shares),
            "assignment": ("operation", [2, -1]),
            "utilisation": ("module", shares[0]),
        },
        coords={"module": range(4), "operation": ["add", "sine"]},
    )
    ordered = ordered_activation(scores).transpose("operation", "module")
    assert ordered[0].to_numpy().tolist() == pytest.approx([0.3, 0.4, 0.2, 0.1])


def test_a_network_that_collapsed_shows_no_diagonal():
    ordered = ordered_activation(scored([4, 4, 4])).sel(layer="0").transpose("operation", "module")
    assert np.allclose(ordered, np.eye(1, 6))


def test_scores_of_something_else_are_refused():
    with pytest.raises(KeyError, match="assignment"):
        ordered_activation(scored([0, 1, 2]).drop_vars("assignment"))
