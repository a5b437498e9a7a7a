"""What holds for every attention that `mechanisms` exports."""

import pytest
import torch
from torch.testing import assert_close

import mechanisms
from tests.contracts.examples import ATTENTIONS

WIDTH, N_POS = 16, 6
every_attention = pytest.mark.parametrize("config", ATTENTIONS)


def module_of(config):
    module = config.build(WIDTH, generator=torch.Generator().manual_seed(0))
    return module.double().eval()


def tokens(n_examples=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n_examples, N_POS, WIDTH, generator=generator, dtype=torch.float64)


@every_attention
def test_every_attention_keeps_the_rules_of_a_mechanism(config):
    assert config.n_heads == 4
    x = tokens()
    mechanisms.check(
        module_of(config), (x, x), build=lambda g: config.build(WIDTH, generator=g).double()
    )


@every_attention
def test_masks_that_would_be_misread_are_refused(config):
    module, x = module_of(config), tokens(n_examples=N_POS)
    with pytest.raises(ValueError, match="mask must be"):
        module(x, x, mask=torch.ones(N_POS, N_POS, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be boolean"):
        module(x, x, mask=torch.ones(1, 1, 1, N_POS))


@every_attention
def test_the_last_queries_alone_give_their_rows_unless_all_are_needed(config):
    module, x = module_of(config), tokens()
    if config.needs_all_queries:
        with pytest.raises(ValueError, match="2 queries and 6 keys"):
            module(x[:, -2:], x)
    else:
        assert_close(module(x[:, -2:], x), module(x, x)[:, -2:])


@every_attention
def test_the_order_of_keys_counts_only_where_distances_are_measured(config):
    module, x = module_of(config), tokens()
    order = torch.tensor([1, 0, 2, 5, 4, 3])
    same = torch.allclose(module(x, x[:, order]), module(x, x))
    assert same != config.measures_distances


@every_attention
def test_two_sequences_can_be_crossed_unless_it_says_otherwise(config):
    sizes = {"d_input": 7, "d_output": 7, "d_model": WIDTH, "n_layers": 1}
    ends = {"begin": 0, "end": 1, "padding": 2}
    mlp = mechanisms.FeedForwardConfig(d_mlp=8)

    def model():
        return mechanisms.EncoderDecoder(
            mechanisms.EncoderDecoderConfig(**sizes, **ends, attention=config, feed_forward=mlp)
        )

    if config.measures_distances or config.needs_all_queries:
        with pytest.raises(ValueError, match="must not"):
            model()
    else:
        assert model()(torch.tensor([[3, 4, 5]]), torch.tensor([[0, 3]])).shape == (1, 2, 7)


@every_attention
def test_a_model_with_it_is_saved_and_loaded(config, tmp_path):
    model = mechanisms.Transformer(
        mechanisms.TransformerConfig(
            d_input=8,
            d_output=5,
            d_model=WIDTH,
            n_layers=2,
            attention=config,
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=8),
            positions="none",
        )
    ).eval()
    mechanisms.save(model, tmp_path / "model.safetensors")
    x = torch.randn(2, N_POS, 8)
    loaded = mechanisms.load(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    assert torch.equal(loaded(x), model(x))


@every_attention
@pytest.mark.parametrize("shape", [(0, N_POS, WIDTH), (2, 0, WIDTH)])
def test_empty_batches_and_sequences_have_empty_outputs(config, shape):
    module, x = module_of(config), torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    out = module(x, x)
    assert out.shape == shape
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
