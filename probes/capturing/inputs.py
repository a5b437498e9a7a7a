"""What a model is called with and answers, taken apart by examples."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from probes.capturing.hooking import Inputs


def check_answer(answered: Tensor, examples: int) -> Tensor:
    """The answers on the CPU, checked.

    Raises:
        TypeError: they are not whole numbers.
        ValueError: they are no tensor with one row for each example.
    """
    if not isinstance(answered, Tensor) or answered.ndim == 0 or len(answered) != examples:
        shape = tuple(answered.shape) if isinstance(answered, Tensor) else type(answered).__name__
        raise ValueError(f"answer must return a tensor [{examples} examples, ...], got {shape}")
    if answered.is_floating_point() or answered.is_complex():
        raise TypeError(
            f"answer must return whole numbers, which can be compared, got {answered.dtype}"
        )
    return answered.cpu()


def count_examples(name: str, inputs: Inputs) -> int:
    """How many examples a model's inputs hold.

    Raises:
        ValueError: none, or different numbers of them.
    """
    tensors = _tensors(inputs)
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"{name} must be tensors of one number of examples (at least 1), "
            f"got shapes {[tuple(tensor.shape) for tensor in tensors]}"
        )
    return counts.pop()


def _tensors(inputs: Inputs) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)


def take_examples(inputs: Inputs, part: slice) -> Inputs:
    """Some of the examples, in the same layout."""
    if isinstance(inputs, Tensor):
        return inputs[part]
    if isinstance(inputs, Mapping):
        return {name: tensor[part] for name, tensor in inputs.items()}
    return tuple(tensor[part] for tensor in inputs)


def parts(examples: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover all examples."""
    for start in range(0, examples, size):
        yield slice(start, min(start + size, examples))
