"""What holds for all plots: where they draw, what they check, and when matplotlib is imported."""

import inspect
import subprocess
import sys

import pytest

from probes import plots

PLOTS = [getattr(plots, name) for name in plots.__all__ if not name.isupper()]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_axes_are_optional_and_returned_and_settings_are_keywords(plot):
    parameters = inspect.signature(plot).parameters
    assert parameters["ax"].default is None
    names = list(parameters)
    settings = [parameters[name] for name in names[names.index("ax") + 1 :]]
    assert {one.kind for one in settings} <= {inspect.Parameter.KEYWORD_ONLY}
    assert len(settings) <= 5
    assert inspect.signature(plot).return_annotation == "Axes"
    assert "Example:" in plot.__doc__


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_arguments_are_checked(plot):
    parameters = inspect.signature(plot).parameters.values()
    required = [one.name for one in parameters if one.default is one.empty]
    with pytest.raises(TypeError, match=f"^{required[0]} of {plot.__name__} must be"):
        plot(**{name: object() for name in required})


def test_matplotlib_is_imported_when_a_plot_is_used():
    script = (
        "import sys, probes, probes.plots; print('matplotlib' in sys.modules); "
        "probes.plots.matrix; print('matplotlib' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout.split() == ["False", "True"], process.stderr
