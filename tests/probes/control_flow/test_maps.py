import numpy as np
import pytest
import xarray as xr

from probes import attention_maps, gate_maps, plot_column_maps
from probes.control_flow.maps import PER_LINE

LABELS = ["BOS", "a", "b"]


@pytest.fixture
def attention():
    weights = np.random.default_rng(0).random((9, 2, 4, 4))
    return xr.DataArray(weights, dims=("step", "head", "query_pos", "key_pos"))


def texts(labels):
    return [label.get_text() for label in labels]


def test_attention_is_the_maximum_over_heads_at_every_step_or_chosen_heads(attention):
    # The fourth column is padding.
    maps = attention_maps("one", attention, LABELS)
    assert list(maps.names) == [f"step {step}" for step in range(9)]
    np.testing.assert_array_equal(maps.matrices, attention.to_numpy().max(1)[:, :3, :3])
    update = xr.DataArray(np.zeros((9, 4), bool), dims=("step", "pos"))
    update[4, [1, 3]] = True
    chosen = attention_maps("two", attention, LABELS, panels=[(4, 1), (2, None)], update=update)
    assert list(chosen.names) == ["step 4, head 1", "step 2"]
    np.testing.assert_array_equal(chosen.matrices[0], attention.to_numpy()[4, 1, :3, :3])
    assert chosen.framed == [[1], []]
    with pytest.raises(ValueError, match="attention must have the dims"):
        attention_maps("one", attention[0], LABELS)
    with pytest.raises(ValueError, match="panels must be at least one step, got none"):
        attention_maps("one", attention, LABELS, panels=[])


def test_gates_have_a_row_for_each_channel():
    gates = np.random.default_rng(0).random((2, 4, 6))
    maps = gate_maps("one", xr.DataArray(gates, dims=("step", "pos", "channel")), LABELS)
    np.testing.assert_array_equal(maps.matrices, gates[:, :3].transpose(0, 2, 1))
    assert maps.rows is None


def test_maps_are_drawn_in_lines_with_labels_and_frames(attention):
    update = xr.DataArray(np.zeros((9, 4), bool), dims=("step", "pos"))
    update[4, 1] = True
    first = attention_maps("first", attention, LABELS, update=update)
    second = attention_maps("second", attention, LABELS[:2], panels=[(0, 1)])
    figure = plot_column_maps([first, second], bar="attention", note="rows read columns")
    panels = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in panels] == [f"step {i}" for i in range(9)] + [
        "step 0, head 1"
    ]
    for number, axis in enumerate(panels[:9]):
        np.testing.assert_array_equal(axis.images[0].get_array(), first.matrices[number])
        assert axis.images[0].get_clim() == (0, 1)
        assert texts(axis.get_xticklabels()) == LABELS
        # Nine maps are two lines of five, whose first ones have the labels.
        assert texts(axis.get_yticklabels()) == (LABELS if number in (0, 5) else [])
        assert len(axis.patches) == (number == 4)
    (frame,) = panels[4].patches
    assert (frame.get_xy(), frame.get_width(), frame.get_height()) == ((-0.5, 0.5), 3, 1)
    assert PER_LINE < 9
    assert [part.get_suptitle() for part in figure.subfigs] == ["first", "second"]
    assert figure.axes[-1].get_ylabel() == "attention"
    with pytest.raises(ValueError, match="examples must be at least one, got none"):
        plot_column_maps([], bar="", note="")
