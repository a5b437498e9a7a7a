"""The differentiable neural computer (DNC): an LSTM that reads and writes a memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, softplus
from transformer_lens.hook_points import HookPoint

from mechanisms.dropout import dropout
from mechanisms.initialization import uniform, zeros
from mechanisms.models.lstm import LstmHooks, RecurrentModel, lstm_step
from mechanisms.sequences import mask_padding
from mechanisms.validation import check_dropout, check_sizes

NORM_EPSILON = 1e-6
"""Added to squared norms, so that an empty memory row has similarity 0 to every key."""

USAGE_EPSILON = 1e-6
"""Usage is rescaled from [0, 1] to [this, 1], so that products of usages are differentiable."""

LINK_EPSILON = 1e-6
"""Link weights whose largest entry is below this are not normalised to a distribution."""


@dataclass(frozen=True, kw_only=True)
class DncConfig:
    """Configuration of a `Dnc`: sizes of controller and memory, options of the memory.

    The defaults of the options are those of Csordás et al. 2021 (their code; the text refers to
    Csordás & Schmidhuber 2019, who propose the first three).

    Args:
        d_input: number of token ids.
        d_output: number of logits.
        d_embed: width of the token embeddings.
        d_hidden: width of the controller, an LSTM of one layer.
        n_cells: number of rows of the memory.
        d_cell: width of a row.
        n_read_heads: number of read heads; there is one write head.
        masked_content_addressing: whether heads compare only a part of a row with their key.
        deallocation: whether a freed row is erased, not only marked for overwriting.
        link_sharpness: whether heads sharpen the distributions that follow the links.
        clip_controls: the controls that the controller emits are clipped to ± this; None for all.
        dropout: dropout probability of the embeddings; there is no dropout between steps.

    Raises:
        ValueError: a setting is outside its range.

    Example:
        >>> sizes = {"d_input": 10, "d_output": 3, "d_embed": 8, "d_hidden": 16}
        >>> Dnc(DncConfig(n_cells=8, d_cell=4, **sizes))(tokens).shape[-1]
        3
    """

    d_input: int
    d_output: int
    d_embed: int
    d_hidden: int
    n_cells: int
    d_cell: int
    n_read_heads: int = 1
    masked_content_addressing: bool = False
    deallocation: bool = True
    link_sharpness: bool = True
    clip_controls: float | None = 20.0
    dropout: float = 0.0

    def __post_init__(self):
        if self.clip_controls is not None and not self.clip_controls > 0:
            raise ValueError(f"clip_controls must be positive, got {self.clip_controls}")
        check_sizes(self, "d_input", "d_output", "d_embed", "d_hidden")
        check_sizes(self, "n_cells", "d_cell", "n_read_heads")
        check_dropout(self)


def content_weights(
    memory: Float[Tensor, "batch cell d_cell"],
    keys: Float[Tensor, "batch head d_cell"],
    masks: Float[Tensor, "batch head d_cell"] | None,
    strengths: Float[Tensor, "batch head"],
) -> Float[Tensor, "batch head cell"]:
    """Softmax over memory rows i of strength cos(key * mask, memory[i] * mask).

    Graves et al. 2016, "Content-based addressing", with the masks of Csordás & Schmidhuber 2019:
    a head compares only the masked part of a row with its key. Keys are any real numbers; masks
    are in [0, 1], None for all 1; strengths are at least 1.
    """
    squares = torch.ones_like(keys[:, :1]) if masks is None else masks**2
    products = (keys * squares) @ memory.mT
    # The masked norms of all rows for all heads, without masking the memory for each head.
    row_norms = (squares @ (memory**2).mT + NORM_EPSILON).rsqrt()
    key_norms = ((keys**2 * squares).sum(-1) + NORM_EPSILON).rsqrt()
    return (products * row_norms * (strengths * key_norms)[..., None]).softmax(-1)


def allocation_weights(usage: Float[Tensor, "batch cell"]) -> Float[Tensor, "batch cell"]:
    """Write weights of free rows: (1 - usage[i]) times the usages of all rows freer than i.

    Graves et al. 2016, "Dynamic memory allocation". Of equally free rows the first counts as the
    freest. The weights are in [0, 1] and sum to 1 minus the product of all usages.
    """
    usage = USAGE_EPSILON + (1 - USAGE_EPSILON) * usage
    ascending, order = usage.sort(dim=-1, stable=True)
    freer = ascending.cumprod(-1) / ascending
    return torch.zeros_like(usage).scatter(-1, order, (1 - ascending) * freer)


def updated_links(
    links: Float[Tensor, "batch cell cell"],
    precedence: Float[Tensor, "batch cell"],
    write_weights: Float[Tensor, "batch cell"],
) -> Float[Tensor, "batch cell cell"]:
    """The next links: (1 - w[i] - w[j]) links[i, j] + w[i] precedence[j], and 0 for i = j.

    Graves et al. 2016, "Temporal memory linkage": links[i, j] is the degree to which row i was
    written directly after row j. Rows and columns each sum to at most 1.
    """
    target, source = write_weights[:, :, None], write_weights[:, None, :]
    off_diagonal = 1 - torch.eye(links.shape[-1], dtype=links.dtype, device=links.device)
    return ((1 - target - source) * links + target * precedence[:, None, :]) * off_diagonal


def sharpened(
    weights: Float[Tensor, "*batch cell"], sharpness: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch cell"]:
    """Sharpened weights: weights[i]^s / sum_j weights[j]^s, or near 0 if all weights are near 0.

    Csordás & Schmidhuber 2019, the link distributions' sharpness. Before any rows are linked there
    is no distribution to sharpen: if the largest weight is below `LINK_EPSILON`, the result goes to
    0 with it. Weights are in [0, 1]; negative ones (from rounding or an intervention) count as 0.
    """
    weights = weights.clamp(min=0)
    # Scaling the largest weight to 1 prevents underflow of the powers. The scale cancels out, or
    # is constant, so it needs no gradient.
    scale = weights.detach().amax(-1, keepdim=True).clamp(min=LINK_EPSILON)
    # Powers of 0 have no second derivative.
    positive = weights > 0
    powers = torch.where(positive, weights / scale, 1.0) ** sharpness[..., None]
    powers = torch.where(positive, powers, 0.0)
    return powers / powers.sum(-1, keepdim=True).clamp(min=1)


class DncHooks(LstmHooks):
    """The hook points of one step of a DNC.

    Of the controller `hook_cell`, `hook_hidden` [batch, d_hidden]; of the interface
    `hook_free_gates` [batch, head], `hook_allocation_gate`, `hook_write_gate` [batch] in [0, 1]
    and `hook_read_modes` [batch, head, 3], probabilities of backward, content, forward; of the
    memory `hook_usage` [batch, cell], `hook_write_weights` [batch, cell],
    `hook_memory` [batch, cell, d_cell] (after writing), `hook_links` [batch, cell, cell],
    `hook_read_weights` [batch, read_head, cell] and `hook_read_vectors`
    [batch, read_head, d_cell].
    """

    def __init__(self):
        super().__init__()
        self.hook_free_gates, self.hook_allocation_gate = HookPoint(), HookPoint()
        self.hook_write_gate, self.hook_read_modes = HookPoint(), HookPoint()
        self.hook_usage, self.hook_write_weights = HookPoint(), HookPoint()
        self.hook_memory, self.hook_links = HookPoint(), HookPoint()
        self.hook_read_weights, self.hook_read_vectors = HookPoint(), HookPoint()


class DncState(NamedTuple):
    """The state between two steps; all zeros before the first step.

    Attributes:
        hidden, cell: [batch, d_hidden], of the controller.
        memory: [batch, cell, d_cell].
        usage: [batch, cell], in [0, 1].
        links: [batch, cell, cell], the degree to which a row was written directly after another.
        precedence: [batch, cell], the degree to which a row was the last one written.
        write_weights: [batch, cell].
        read_weights: [batch, read_head, cell].
        read_vectors: [batch, read_head, d_cell].
    """

    hidden: Float[Tensor, "batch d_hidden"]
    cell: Float[Tensor, "batch d_hidden"]
    memory: Float[Tensor, "batch cell d_cell"]
    usage: Float[Tensor, "batch cell"]
    links: Float[Tensor, "batch cell cell"]
    precedence: Float[Tensor, "batch cell"]
    write_weights: Float[Tensor, "batch cell"]
    read_weights: Float[Tensor, "batch read_head cell"]
    read_vectors: Float[Tensor, "batch read_head d_cell"]


class DncCell(nn.Module):
    """One step of a DNC: the controller, then writing, then reading.

    Graves et al. 2016, "Methods", with the changes of Csordás & Schmidhuber 2019. sigma is the
    logistic function and oneplus(x) = 1 + softplus(x). The controller, an LSTM, reads the token
    and the previous step's read vectors: its gates are x W_x + [read vectors; h] W_h + b. A linear
    map (`W_interface`, `b_interface`) of its hidden state, clipped, gives, in this order of
    columns, with the heads concatenated within each,

    - the read heads' keys k, masks m = sigma(.) and strengths b = oneplus(.), then the write
      head's own three;
    - the erase vector e = sigma(.) and the write vector v;
    - the read heads' free gates f = sigma(.), then the allocation gate ga and the write gate
      gw = sigma(.);
    - the read heads' modes (pi_backward, pi_content, pi_forward) = softmax(.) and sharpnesses
      (s_backward, s_forward) = oneplus(.).

    Without masked content addressing there are no columns of m, which is 1; without link sharpness
    none of s, and links are followed without `sharpened`; without deallocation the memory is not
    multiplied by psi.

    With w the write and r_h the read weights, M the memory, and ' for the step before:

    - retention        psi = prod_h (1 - f_h r_h')
    - usage            u = (u' + w' - u' w') psi
    - writing          w = gw (ga allocation_weights(u) + (1 - ga) content_weights(M', k, m, b))
    - memory           M = M' * psi 1^T * (1 - w e^T) + w v^T
    - links            L = updated_links(L', p', w), then p = (1 - sum_i w_i) p' + w
    - reading          r_h = pi_backward sharpened(L^T r_h', s_backward)
      + pi_content content_weights(M, k_h, m_h, b_h) + pi_forward sharpened(L r_h', s_forward)
    - read vectors     M^T r_h

    Csordás & Schmidhuber added m, psi in the memory (a freed row is erased, not only marked for
    overwriting) and the sharpening.

    `W_x`, `W_h` and `W_interface` start uniformly with the variances of Glorot & Bengio 2010 (the
    fans of one gate; 5/3 times the bound for the cell's content), biases at 0, those of the forget
    gates at 1, as in the code of Csordás et al. 2021.
    """

    def __init__(self, config: DncConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.n_cells, self.d_cell = config.n_cells, config.d_cell
        self.n_heads, self.d_hidden = config.n_read_heads, config.d_hidden
        self.clip, self.deallocation = config.clip_controls, config.deallocation
        heads, width, d_hidden = config.n_read_heads, config.d_cell, config.d_hidden
        masked, sharpens = config.masked_content_addressing, config.link_sharpness
        splits = {"keys": heads * width, "masks": heads * width * masked, "strengths": heads}
        splits |= {"write_key": width, "write_mask": width * masked, "write_strength": 1}
        splits |= {"erase": width, "write_vector": width, "free": heads}
        splits |= {"allocation_gate": 1, "write_gate": 1, "modes": 3 * heads}
        splits |= {"sharpness": 2 * heads * sharpens}
        self.splits = {name: size for name, size in splits.items() if size}

        n_read = heads * width
        bound = (6 / (config.d_embed + n_read + 2 * d_hidden)) ** 0.5
        self.W_x = uniform(config.d_embed, 4 * d_hidden, bound=bound, generator=generator)
        self.W_h = uniform(n_read + d_hidden, 4 * d_hidden, bound=bound, generator=generator)
        self.b = zeros(4 * d_hidden)
        with torch.no_grad():
            for weight in (self.W_x, self.W_h):
                weight[:, 2 * d_hidden : 3 * d_hidden] *= 5 / 3
            self.b[d_hidden : 2 * d_hidden] = 1
        n_interface = sum(self.splits.values())
        bound = (6 / (d_hidden + n_interface)) ** 0.5
        self.W_interface = uniform(d_hidden, n_interface, bound=bound, generator=generator)
        self.b_interface = zeros(n_interface)

    def initial_state(self, batch: int) -> DncState:
        """Zeros with the dtype and on the device of the weights."""

        def empty(*shape: int) -> Tensor:
            return self.b.new_zeros(batch, *shape)

        return DncState(
            hidden=empty(self.d_hidden),
            cell=empty(self.d_hidden),
            memory=empty(self.n_cells, self.d_cell),
            usage=empty(self.n_cells),
            links=empty(self.n_cells, self.n_cells),
            precedence=empty(self.n_cells),
            write_weights=empty(self.n_cells),
            read_weights=empty(self.n_heads, self.n_cells),
            read_vectors=empty(self.n_heads, self.d_cell),
        )

    def forward(
        self,
        inputs: Float[Tensor, "batch four_d_hidden"],
        state: DncState,
        *,
        hooks: DncHooks,
    ) -> DncState:
        """The state after a step; `inputs` is the token's contribution to the gates, x W_x + b."""
        batch, heads, width = len(inputs), self.n_heads, self.d_cell
        recurrent = torch.cat((state.read_vectors.flatten(1), state.hidden), -1)
        hidden, cell = lstm_step(inputs + linear(recurrent, self.W_h.T), state.cell, hooks=hooks)

        controls = linear(hidden, self.W_interface.T, self.b_interface)
        if self.clip is not None:
            controls = controls.clamp(-self.clip, self.clip)
        parts = controls.split(list(self.splits.values()), -1)
        control = dict(zip(self.splits, parts, strict=True))
        free_gates = hooks.hook_free_gates(control["free"].sigmoid())
        allocation_gate = hooks.hook_allocation_gate(control["allocation_gate"][:, 0].sigmoid())
        write_gate = hooks.hook_write_gate(control["write_gate"][:, 0].sigmoid())
        read_modes = hooks.hook_read_modes(control["modes"].view(batch, heads, 3).softmax(-1))
        masks = write_mask = None
        if "masks" in control:
            masks = control["masks"].view(batch, heads, width).sigmoid()
            write_mask = control["write_mask"][:, None].sigmoid()

        retention = (1 - free_gates[..., None] * state.read_weights).prod(1)
        usage = state.usage + state.write_weights - state.usage * state.write_weights
        usage = hooks.hook_usage(usage * retention)
        write_content = content_weights(
            state.memory,
            control["write_key"][:, None],
            write_mask,
            1 + softplus(control["write_strength"]),
        )[:, 0]
        allocated = allocation_gate[:, None] * allocation_weights(usage)
        address = allocated + (1 - allocation_gate[:, None]) * write_content
        write_weights = hooks.hook_write_weights(write_gate[:, None] * address)

        # The equation of the docstring with the terms in w combined: fewer passes over the memory.
        memory = state.memory * retention[..., None] if self.deallocation else state.memory
        erase, write_vector = control["erase"].sigmoid()[:, None], control["write_vector"][:, None]
        change = torch.addcmul(write_vector, memory, erase, value=-1)
        memory = hooks.hook_memory(torch.addcmul(memory, write_weights[..., None], change))
        links = hooks.hook_links(updated_links(state.links, state.precedence, write_weights))
        total_written = write_weights.sum(-1, keepdim=True)
        precedence = (1 - total_written) * state.precedence + write_weights

        neighbours = torch.stack((state.read_weights @ links, state.read_weights @ links.mT), 2)
        if "sharpness" in control:
            sharpness = 1 + softplus(control["sharpness"].view(batch, heads, 2))
            neighbours = sharpened(neighbours, sharpness)
        keys, strengths = control["keys"].view(batch, heads, width), control["strengths"]
        read_content = content_weights(memory, keys, masks, 1 + softplus(strengths))
        backward, forward = neighbours.unbind(2)
        candidates = torch.stack((backward, read_content, forward), 2)
        read_weights = hooks.hook_read_weights((read_modes[..., None] * candidates).sum(2))
        read_vectors = hooks.hook_read_vectors(read_weights @ memory)
        return DncState(
            hidden=hidden,
            cell=cell,
            memory=memory,
            usage=usage,
            links=links,
            precedence=precedence,
            write_weights=write_weights,
            read_weights=read_weights,
            read_vectors=read_vectors,
        )


class Dnc(RecurrentModel):
    """A DNC that classifies token sequences, a baseline of Csordás et al. 2021.

    Graves et al. 2016 with the options of Csordás & Schmidhuber 2019: see `DncCell` for the
    equations. The output at the last token is the sum of linear maps of the controller's hidden
    state (`W_controller`) and of the read vectors (`W_read`), as wide as the controller, with a
    bias (`b_out`); the logits are a linear map of it (`W_U`, `b_U`). These start uniformly: the
    first two as in `DncCell`, the last in ±fan_in^-1/2 with its bias; embeddings as in
    `RecurrentModel`.

    Hook points: `hook_embed` [batch, pos, d_embed], and
    `steps.{pos}.*`, the `DncHooks` of the step that reads position pos: a change there affects the
    rest of that step and all later steps. The steps at the padding of a shorter sequence run too;
    their activations have no meaning and no effect.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> sizes = {"d_embed": 8, "d_hidden": 16, "n_cells": 6, "d_cell": 4}
        >>> model = Dnc(DncConfig(d_input=10, d_output=3, **sizes))
        >>> model.set_positions(5)  # the hook points of five tokens
        >>> _, cache = model.run_with_cache(tokens)
        >>> cache["steps.4.hook_memory"].shape  # after the last token
        torch.Size([40, 6, 4])
    """

    def __init__(self, config: DncConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.d_input, config.d_embed, generator=generator)
        self.config = config
        self.core = DncCell(config, generator=generator)
        self.steps = nn.ModuleList()
        d_hidden, n_read = config.d_hidden, config.n_read_heads * config.d_cell
        bound = (3 / d_hidden) ** 0.5
        self.W_controller = uniform(d_hidden, d_hidden, bound=bound, generator=generator)
        bound = (6 / (n_read + d_hidden)) ** 0.5
        self.W_read = uniform(n_read, d_hidden, bound=bound, generator=generator)
        self.b_out = zeros(d_hidden)
        bound = d_hidden**-0.5
        self.W_U = uniform(d_hidden, config.d_output, bound=bound, generator=generator)
        self.b_U = uniform(config.d_output, bound=bound, generator=generator)
        self.setup()

    def _extend_steps(self, n_steps: int) -> None:
        self.steps.extend(DncHooks() for _ in range(len(self.steps), n_steps))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch 1 d_output"]:
        """The logits of each sequence.

        Args:
            tokens: ids in [0, d_input); negative ids are padding, which must be at the end.

        Raises:
            ValueError: as for `mask_padding`.
        """
        self.set_positions(tokens.shape[1])
        ids, _, end = mask_padding(tokens, self.config.d_input)
        x = dropout(self.hook_embed(self.W_E[ids]), self.config.dropout, self.training)
        inputs = linear(x, self.core.W_x.T, self.core.b).unbind(1)
        state = self.core.initial_state(len(ids))
        outputs = []
        # The epsilons and the products of many numbers below 1 are too small for float16.
        with torch.autocast(x.device.type, enabled=False):
            for position, token_inputs in enumerate(inputs):
                token_inputs = token_inputs.to(self.core.b.dtype)
                state = self.core(token_inputs, state, hooks=self.steps[position])
                outputs.append(torch.cat((state.hidden, state.read_vectors.flatten(1)), -1))
        final = torch.stack(outputs, 1)[torch.arange(len(end), device=end.device), end]
        # One product: the sum of the maps of both parts.
        both = torch.cat((self.W_controller, self.W_read))
        output = linear(final, both.T, self.b_out)
        return linear(output, self.W_U.T, self.b_U)[:, None]
