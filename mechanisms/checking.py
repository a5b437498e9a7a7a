"""What holds for every mechanism, checked of a component of your own."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.base import Attention
from mechanisms.hooking import observed
from mechanisms.serialization import load, save

_TOLERANCE = 1e-5

Tensors = tuple[Tensor, ...]


def check(
    component: nn.Module,
    inputs: Tensor | Tensors,
    *,
    build: Callable[[torch.Generator], nn.Module] | None = None,
    optional: Sequence[str] = (),
) -> None:
    """Check that a component keeps what holds for every mechanism; return nothing if it does.

    It works on copies: the component, its mode and its gradients stay as they are. Checked are:

    - Hooks: each hook point fires, and a change there (noise, zeros, or the values of other
      examples) reaches the output; nothing that a hook received is changed afterwards; a model's
      hook points are in its `hook_dict`.
    - Observation: outputs and gradients are the same with hooks, with each of them alone, without
      any and in inference mode, and training works after a call in inference mode.
    - Outputs: neither NaN nor inf (logits may be -inf); the same in a second call in evaluation
      mode; those of an example depend on no other example; inputs are not changed.
    - Gradients: each parameter gets one, and it is finite.
    - Masks, if the component is an attention, that is if its `forward` takes `x_query`, `x_key` and
      `mask`: keys that are masked do not count, neither for queries that may attend to nothing,
      where outputs and gradients are finite; `hook_pattern` is 0 where the mask is False.
    - Weights: with `build`, they follow from the generator alone, and `state_dict` holds all that
      the output depends on. A model that can be saved is the same after `save` and `load`.

    Numbers may differ by 1e-5 of the largest of them, or by 1e-5 if that is less than 1.

    Args:
        component: an attention, a feed-forward layer, a router, a whole model.
        inputs: what it is called with, each [example, ...] with 2 examples or more. Pass the same
            tensor twice for self-attention.
        build: makes the component anew, with weights from a generator.
        optional: names of hook points, or patterns such as "blocks.*.hook_gate", that may not fire
            on these inputs, or whose changes may not reach the output.

    Raises:
        ValueError: the component breaks a rule, and the message lists all that it breaks; `inputs`
            have no examples to compare; `optional` names no hook point; `component` has hooks.
        TypeError: the output is no tensor and no tuple of tensors.

    Example:
        >>> config = mechanisms.AttentionConfig(n_heads=4, d_head=4)
        >>> x = torch.randn(3, 6, 16)
        >>> mechanisms.check(
        ...     config.build(16), (x, x), build=lambda g: config.build(16, generator=g)
        ... )
    """
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    sizes = {len(x) if x.ndim else 0 for x in inputs}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            "inputs must each have the same number of examples, 2 or more, as their first dim, got "
            f"shapes {', '.join(str(tuple(x.shape)) for x in inputs)}"
        )
    if observed(component):
        raise ValueError("component must have no hooks while it is checked: call reset_hooks()")
    inputs = _each(inputs, torch.detach)
    with torch.random.fork_rng(), torch.no_grad():
        module = deepcopy(component).eval()
        # In inference mode first: other calls would fill what the component keeps.
        broken = [*_inference(component, inputs), *_outputs(module, inputs)]
        # Where the output changes by itself, comparisons mean nothing.
        if not broken:
            broken = [
                *_examples(module, inputs),
                *_observation(module, inputs),
                *_hooks(module, inputs, optional),
                *_gradients(module, inputs),
                *_masks(module, inputs),
                *_weights(component, inputs, build),
                *_files(module, inputs),
            ]
    if broken:
        raise ValueError(
            f"{type(component).__name__} must keep the rules of a mechanism, but\n- "
            + "\n- ".join(broken)
        )


def _inference(component: nn.Module, inputs: Tensors) -> Iterator[str]:
    """The first call: tensors that it keeps for later ones must not spoil training."""
    module = deepcopy(component).eval()
    with torch.inference_mode():
        first = [output.clone() for output in _call(module, inputs)]
    try:
        _gradients_of(module, inputs)
    except RuntimeError as error:
        # torch: "Inference tensors cannot be saved for backward", "Inplace update to inference ..."
        if "inference tensor" not in str(error).lower():
            raise
        yield f"training fails after a call in inference mode: {str(error).splitlines()[0]}"
    else:
        outputs = _call(module, inputs)
        yield from _differs("the output outside of inference mode", outputs, first)


def _outputs(module: nn.Module, inputs: Tensors) -> Iterator[str]:
    given = _each(inputs, torch.clone)
    outputs, again = _tensors(module(*given)), _call(module, inputs)
    for i, (x, before) in enumerate(zip(given, inputs, strict=True)):
        if not torch.equal(x, before):
            yield f"inputs[{i}] is changed in place: change a copy"
    for output in outputs:
        if n_undefined := int(_undefined(output).sum()):
            yield f"the output has {n_undefined} values that are NaN or inf"
    yield from _differs("in evaluation mode, the output of a second call", again, outputs)


def _examples(module: nn.Module, inputs: Tensors) -> Iterator[str]:
    n_examples = len(inputs[0])
    outputs = _call(module, inputs)
    for output in outputs:
        if not output.ndim or len(output) != n_examples:
            yield (
                f"the output must be [example, ...] for {n_examples} examples, got shape "
                f"{tuple(output.shape)}"
            )
            return
    for i in (0, n_examples - 1):
        one = slice(i, i + 1)
        alone = _call(module, _each(inputs, lambda x, one=one: x[one]))
        expected = [output[one] for output in outputs]
        yield from _differs(f"the output of example {i}, passed alone,", alone, expected)


def _observation(module: nn.Module, inputs: Tensors) -> Iterator[str]:
    """Whatever path is taken because someone listens, it gives the same numbers."""
    points = _points(module)
    expected = _call(module, inputs)
    shown: list[tuple[str, Tensor, Tensor]] = []
    with _listening(points, lambda name, x: shown.append((name, x, x.clone()))):
        outputs = _call(module, inputs)
    if changed := {name for name, x, copy in shown if not _equal(x, copy)}:
        yield f"what hooks at {_listed(changed)} received is changed in place afterwards"
    if differences := [*_differs("the output with all hooks", outputs, expected)]:
        yield from differences
        return
    for name, point in points.items():
        with _listening({name: point}, lambda name, x: None):
            outputs = _call(module, inputs)
        yield from _differs(f"the output with a hook at {name} alone", outputs, expected)
    gradients = _gradients_of(module, inputs)
    with _listening(points, lambda name, x: None):
        for name, gradient in _gradients_of(module, inputs).items():
            if gradient is not None and (unobserved := gradients[name]) is not None:
                yield from _differs(
                    f"with all hooks, the gradient of {name}", [gradient], [unobserved]
                )


def _hooks(module: nn.Module, inputs: Tensors, optional: Sequence[str]) -> Iterator[str]:
    fired: set[str] = set()
    points = _points(module)
    with _listening(points, lambda name, x: fired.add(name)):
        _call(module, inputs)
    _check_patterns(optional, points)
    # `setup` makes `hook_dict`.
    missing = set(points) - set(vars(module).get("hook_dict", {}))
    if isinstance(module, HookedRootModule) and missing:
        yield f"hook_dict must hold all hook points, but not {_listed(missing)}: call setup()"
    # Weights may start at values, such as 0, that let nothing through.
    moved = deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    for parameter in moved.parameters():
        parameter.data += 0.1 * _noise(parameter, generator)
    required = [name for name in points if not any(fnmatchcase(name, each) for each in optional)]
    if silent := [name for name in required if name not in fired]:
        yield (
            f"{_listed(silent)} must fire: pass the quantity through the hook point (a compiled "
            "model ignores hooks: check the eager one), or name it in `optional`"
        )
    unread = [
        name
        for name in required
        if name in fired and not (_reaches(module, inputs, name) or _reaches(moved, inputs, name))
    ]
    if unread:
        yield (
            f"changes at {_listed(unread)} (noise, zeros, the values of other examples) must reach "
            "the output: go on with what the hook point returns, or name it in `optional`"
        )


def _reaches(module: nn.Module, inputs: Tensors, name: str) -> bool:
    point = {name: _points(module)[name]}
    expected = _call(module, inputs)
    for change in (_with_noise, torch.zeros_like, _of_other_examples):
        with _listening(point, lambda name, x, change=change: change(x)):
            outputs = _call(module, inputs)
        if not all(map(_equal, outputs, expected)):
            return True
    return False


def _gradients(module: nn.Module, inputs: Tensors) -> Iterator[str]:
    found = _gradients_of(deepcopy(module).train(), inputs)
    yield from _not_finite(found, "in training mode,")
    missing = {name for name, gradient in found.items() if gradient is None}
    if missing:
        yield f"no gradient reaches the parameters {_listed(missing)}"


def _masks(module: nn.Module, inputs: Tensors) -> Iterator[str]:
    parameters = inspect.signature(module.forward).parameters
    if not {"x_query", "x_key", "mask"} <= set(parameters):
        return
    x_query, x_key = inputs
    mask = torch.ones(len(x_key), 1, 1, x_key.shape[1], dtype=torch.bool, device=x_key.device)
    mask[..., 0] = False
    # No query of the first example may attend to anything.
    mask[0] = False
    noise = _noise(x_key, torch.Generator().manual_seed(0))
    other_key = torch.where(mask[:, 0, 0, :, None], x_key, x_key + noise)
    # Where all queries count, what is masked changes as a query, too, and others are compared.
    needs_all = isinstance(module, Attention) and module.config.needs_all_queries
    pairs = ((x_query, x_key), (other_key if needs_all else x_query, other_key))
    points = _points(module)
    for mode in ("unobserved", "observed"):
        patterns: dict[str, Tensor] = {}
        with _listening(points if mode == "observed" else {}, patterns.__setitem__):
            output, changed = (_call(module, pair, mask=mask) for pair in pairs)
            gradients = _gradients_of(module, (x_query, x_key), mask=mask)
        if any(_undefined(part).any() for part in output):
            yield f"{mode}, the output is NaN or inf where a query may attend to nothing"
        else:
            if needs_all:
                output, changed = ([part[:, 1:] for part in parts] for parts in (output, changed))
            yield from _differs(
                f"{mode}, the output after a change of masked keys", changed, output
            )
        yield from _not_finite(gradients, f"{mode}, where a query may attend to nothing,")
        pattern = patterns.get("hook_pattern")
        if pattern is not None and pattern.masked_select(~mask).any():
            yield "hook_pattern is not 0 where the mask is False"


def _weights(
    component: nn.Module, inputs: Tensors, build: Callable[[torch.Generator], nn.Module] | None
) -> Iterator[str]:
    if build is None:
        return
    before = torch.get_rng_state()
    first, second, other = (build(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    if not torch.equal(torch.get_rng_state(), before):
        yield "build draws from the global random state: draw from the generator"
    weights = dict(second.named_parameters())
    unequal = [name for name, x in first.named_parameters() if not torch.equal(x, weights[name])]
    if unequal:
        yield f"with equal generators, build gives different weights {_listed(unequal)}"
    elif weights and all(torch.equal(x, weights[name]) for name, x in other.named_parameters()):
        yield "build gives the same weights for generators of different seeds"
    try:
        other.load_state_dict(component.state_dict())
    except RuntimeError as error:
        yield f"what build gives must take the component's state_dict: {error}"
        return
    example = next(iter(component.parameters()), torch.empty(0))
    other = other.to(example).eval()
    expected = _call(deepcopy(component).eval(), inputs)
    yield from _differs(
        "the output with the state_dict loaded into what build gives",
        _call(other, inputs),
        expected,
    )


def _files(module: nn.Module, inputs: Tensors) -> Iterator[str]:
    """A model that can be saved is the same when it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        try:
            save(module, path)
        except TypeError:
            # A part of a model, which is saved with it, or what cannot be saved.
            return
        own = (type(module), *_config_classes(module.config))
        loaded = load(path, device=inputs[0].device, classes=own)
    if loaded.config != module.config:
        yield f"load gives another config than the one saved: {loaded.config}"
    yield from _differs(
        "the output after save and load", _call(loaded, inputs), _call(module, inputs)
    )


def _config_classes(config: Any) -> Iterator[type]:
    """The class of a config, and those of the configs in it."""
    yield type(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from _config_classes(value)


def _points(module: nn.Module) -> dict[str, HookPoint]:
    return {name: part for name, part in module.named_modules() if isinstance(part, HookPoint)}


@contextmanager
def _listening(points: dict[str, HookPoint], act: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Call `act` with the name and the activation of each hook point; it may return another."""
    for name, point in points.items():
        point.add_hook(lambda tensor, hook, name=name: act(name, tensor))
    try:
        yield
    except Exception as error:
        if points:
            error.add_note(f"The component was called with hooks at {_listed(points)}")
        raise
    finally:
        for point in points.values():
            point.remove_hooks()


def _call(module: nn.Module, inputs: Tensors, **settings: Tensor) -> Tensors:
    return _tensors(module(*_each(inputs, torch.clone), **settings))


def _tensors(output: Any) -> Tensors:
    parts = output if isinstance(output, tuple) else (output,)
    tensors = tuple(part for part in parts if part is not None)
    if not all(isinstance(part, Tensor) for part in tensors):
        kinds = ", ".join(type(part).__name__ for part in tensors)
        raise TypeError(f"the output of component must be a tensor or a tuple of them, got {kinds}")
    return tensors


def _each(inputs: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    """The changed inputs; what was one tensor stays one, as the two inputs of self-attention."""
    changed = {id(x): change(x) for x in inputs}
    return tuple(changed[id(x)] for x in inputs)


def _gradients_of(
    module: nn.Module, inputs: Tensors, **settings: Tensor
) -> dict[str, Tensor | None]:
    """Gradients of the outputs' sum of squares, by parameter; None where there is none."""
    weights = {name: x for name, x in module.named_parameters() if x.requires_grad}
    torch.manual_seed(0)
    with torch.enable_grad():
        outputs = [x for x in _call(module, inputs, **settings) if x.requires_grad]
        if not weights or not outputs:
            return dict.fromkeys(weights)
        finite = [output.masked_fill(output.isneginf(), 0.0) for output in outputs]
        loss = torch.stack([output.square().sum() for output in finite]).sum()
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return dict(zip(weights, found, strict=True))


def _not_finite(gradients: dict[str, Tensor | None], where: str) -> Iterator[str]:
    names = [name for name, x in gradients.items() if x is not None and not x.isfinite().all()]
    if names:
        yield f"{where} the gradients of {_listed(names)} are not finite"


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(
        first.double(), second.double(), rtol=0, atol=1e-6, equal_nan=True
    )


def _differs(what: str, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Iterator[str]:
    for one, other in zip(actual, expected, strict=True):
        if one.shape != other.shape:
            yield f"{what} has shape {tuple(one.shape)}, not {tuple(other.shape)}"
        elif other.numel():
            one, other = one.double(), other.double()
            largest = max(1.0, float(other.masked_fill(other.isneginf(), 0.0).abs().max()))
            difference = float((one - other).masked_fill(one == other, 0.0).abs().max())
            if not difference <= _TOLERANCE * largest:
                allowed = _TOLERANCE * largest
                yield f"{what} differs by {difference:.3g}, where {allowed:.0e} is allowed"


def _undefined(output: Tensor) -> Tensor:
    """Where it is NaN or inf; a logit of -inf says that there is no such answer."""
    return output.isnan() | output.isposinf()


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator).to(x)


def _with_noise(x: Tensor) -> Tensor:
    if x.is_floating_point():
        return x + _noise(x, torch.Generator().manual_seed(0))
    # Numbers of experts or positions, of which there are at least two; or truth values.
    return (x == 0).to(x.dtype)


def _of_other_examples(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.ndim else x


def _check_patterns(patterns: Sequence[str], points: dict[str, HookPoint]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in points):
            nearest = get_close_matches(pattern, points, n=3)
            raise ValueError(
                f"optional must name hook points, got {pattern!r}; nearest: {nearest or [*points]}"
            )


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if len(others) > 4 else ", ".join([first, *others])
