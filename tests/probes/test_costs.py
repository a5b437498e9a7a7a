import pytest
import torch

from mechanisms import AttentionConfig, CompositionalAttentionConfig, Lstm, LstmConfig
from probes import count_blocks, count_operations, count_parameters, hooked, measure_costs


class Itself(torch.nn.Module):
    """Self-attention, called with one argument."""

    def __init__(self, config, d_model):
        super().__init__()
        self.attention = config.build(d_model)

    def forward(self, x):
        return self.attention(x, x)


def test_operations_of_attention_are_those_of_its_formula():
    n, d_model, heads, width = 7, 24, 3, 5
    x = torch.randn(4, n, d_model)
    model = Itself(AttentionConfig(n_heads=heads, d_head=width), d_model)
    projections = 4 * n * d_model * heads * width
    assert count_operations(model, lambda model: model(x), len(x)) == 2 * (
        projections + 2 * heads * n**2 * width
    )
    assert model.training
    biases = 3 * heads * width + d_model
    assert count_parameters(model) == 4 * d_model * heads * width + biases


def test_operations_that_are_done_piece_by_piece_are_counted():
    n, d_model, searches, retrievals, width = 7, 24, 3, 2, 5
    config = CompositionalAttentionConfig(
        n_searches=searches, n_retrievals=retrievals, d_head=width, biases="none"
    )
    x = torch.randn(4, n, d_model)
    # Queries, keys, value queries and the output have a matrix for each search.
    projections = n * d_model * (4 * searches + retrievals) * width
    attending = searches * n**2 * width * (1 + retrievals)
    folding = n * searches * width**2
    model = Itself(config, d_model)
    result = count_operations(model, lambda model: model(x), len(x))
    assert result == 2 * (projections + attending + folding)
    of_layers = count_operations(model, lambda model: model(x), len(x), of_layers=True)
    assert of_layers == 2 * (projections + folding)


N, LENGTH, D, MLP = 2, 5, 16, 32
STATES = torch.randn(N, LENGTH, D)
ATTENDING = 2 * 2 * LENGTH**2 * D
SELF_ATTENTION = 2 * 4 * LENGTH * D**2 + ATTENDING


class Attending(torch.nn.Module):
    """Scaled dot-product attention of two heads, without projections."""

    def forward(self, x):
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


class OfItself(torch.nn.MultiheadAttention):
    """Self-attention of torch, called with one argument."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)


@pytest.mark.parametrize(
    ("model", "operations"),
    [
        (torch.nn.LSTM(D, D, batch_first=True), 4 * 2 * LENGTH * 2 * D**2),
        (torch.nn.GRU(D, D, batch_first=True), 3 * 2 * LENGTH * 2 * D**2),
        (torch.nn.RNN(D, D, batch_first=True), 2 * LENGTH * 2 * D**2),
        (Attending(), ATTENDING),
        (OfItself(D, 2, batch_first=True), SELF_ATTENTION),
        (
            torch.nn.TransformerEncoderLayer(D, 2, MLP, batch_first=True),
            SELF_ATTENTION + 2 * 2 * LENGTH * D * MLP,
        ),
    ],
)
def test_operations_of_fused_kernels_are_counted(model, operations):
    assert count_operations(model, lambda model: model(STATES), N) == operations


def test_operations_of_an_lstm_are_those_of_its_formula():
    d_embed, d_hidden, classes, length = 8, 16, 3, 12
    config = LstmConfig(d_input=10, d_output=classes, d_embed=d_embed, d_hidden=d_hidden)
    tokens = torch.randint(10, (4, length))
    gates = length * 4 * d_hidden * (d_embed + d_hidden)
    result = count_operations(Lstm(config), lambda model: model(tokens), 4)
    assert result == 2 * (gates + d_hidden * classes)


def test_flags_are_restored_after_an_error():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout()).train()
    model[1].eval()

    def flags():
        return (
            [part.training for part in model.modules()],
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
        )

    def fail(model):
        assert not model.training
        raise ArithmeticError("inside")

    before = flags()
    with pytest.raises(ArithmeticError, match="inside"):
        count_operations(model, fail, 1)
    assert flags() == before
    count_operations(model, lambda model: model(torch.zeros(2, 3)), 2)
    assert flags() == before


class Product(torch.nn.Module):
    """The matrix product of two arguments."""

    def forward(self, first, second):
        return first @ second


def test_several_inputs_are_arguments():
    inputs = (torch.randn(2, 3, 4), torch.randn(2, 4, 5))
    assert count_operations(Product(), lambda model: model(*inputs), 2) == 2 * 3 * 4 * 5


def test_what_is_frozen_is_no_parameter_that_is_trained():
    model = torch.nn.Linear(3, 4)
    model.bias.requires_grad_(False)
    assert count_parameters(model) == 12


def test_blocks_are_those_that_names_number():
    blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(3, 3)) for _ in range(4)])
    model = torch.nn.ModuleDict({"blocks": blocks, "core": torch.nn.Linear(3, 3)})
    assert count_blocks(model) == 4
    assert count_blocks(torch.nn.Sequential(*blocks)) == 0


def test_blocks_of_any_kind_are_counted_wherever_they_are():
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(3, 3)] * 3)})
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8)
    encoder = torch.nn.ModuleDict(
        {"encoder": torch.nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)}
    )
    assert count_blocks(layers) == 3
    assert count_blocks(encoder) == 5
    assert count_blocks(torch.nn.ModuleDict({"wrapped": encoder})) == 5
    assert count_blocks(torch.nn.DataParallel(hooked(layers, n=1))) == 3
    # The steps of a layer are no layers.
    within = torch.nn.ModuleList([torch.nn.ModuleDict({"steps": torch.nn.ModuleList([layer] * 9)})])
    assert count_blocks(torch.nn.ModuleDict({"layers": within})) == 1


def test_costs_are_all_of_these():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    costs = measure_costs(model, lambda model: model(torch.zeros(5, 3)), 5)
    result = {name: value.item() for name, value in costs.items()}
    assert result == {"parameters": 16, "operations": 24, "layer_operations": 24, "depth": 0}
    assert all(value.attrs["long_name"] for value in costs.values())
    with pytest.raises(ValueError, match="n_examples must be at least 1, got 0"):
        count_operations(model, lambda model: None, 0)
