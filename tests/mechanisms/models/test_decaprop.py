from dataclasses import replace

import pytest
import torch

from mechanisms.attention.alignment import AlignmentConfig
from mechanisms.attention.quasi import QuasiAttentionConfig
from mechanisms.models.decaprop import DecaProp, DecaPropConfig
from tests.mechanisms.checks import check_saved_model_loads, check_seed_determines_weights

PAD = -1
SOFTMAX = DecaPropConfig(d_input=7, padding=PAD, d_embed=4, d_hidden=3, n_layers=2, n_factors=2)
CODA = replace(
    SOFTMAX,
    alignment=AlignmentConfig(
        projection="linear", composition=QuasiAttentionConfig(gate_centring="matrix")
    ),
)
CONFIGS = {"softmax": SOFTMAX, "coda": CODA, "one layer": replace(CODA, n_layers=1)}


def build(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = DecaProp(config, generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(generator=generator)
    return model.double().eval()


def texts():
    passage = torch.tensor([[1, 2, 3, 2, 6], [4, 1, 5, PAD, PAD], [6, 6, 0, 2, PAD]])
    question = torch.tensor([[2, 3, 0], [5, PAD, PAD], [1, 0, PAD]])
    return passage, question


def read(layer, x):
    """Both directions of an LSTM over one text without padding, by torch."""
    forward = layer.lstm(x[None])[0][0]
    backward = layer.backward_lstm(x.flip(0)[None])[0][0].flip(0)
    return torch.cat([forward, backward], 1)


def connect(connector, p, q):
    masks = (torch.ones(1, len(x)).bool() for x in (p, q))
    return [None if x is None else x[0] for x in connector(p[None], q[None], *masks)]


def attend(module, p, q):
    return module(p[None], q[None], torch.ones(1, len(p)).bool(), torch.ones(1, len(q)).bool())[0]


def literal(model, passage, question):
    """Sections 3.1 to 3.4 for one passage and question, lists of ids without padding."""
    n = model.config.n_layers

    def embed(tokens, other):
        rows = []
        for token in tokens:
            numbers = [float(token in other), passage.count(token) / len(passage)]
            rows.append(torch.cat([model.W_E[token], torch.tensor(numbers).double()]))
        return torch.stack(rows)

    p, q = embed(passage, question), embed(question, passage)
    P, Q, Z = [], [], {}
    for layer in range(n):
        if layer:
            level = Z[layer - 1, layer - 1]
            p, q = (torch.cat([x[-1], z], 1) for x, z in zip((P, Q), level, strict=True))
        P.append(read(model.encoder[layer], p))
        Q.append(read(model.encoder[layer], q))
        for i in range(layer + 1):
            for j in range(layer + 1):
                Z[i, j] = connect(model.connectors[i][j], P[i], Q[j])
    all_p, all_q = (
        torch.cat(x + [Z[i, j][side] for i in range(n) for j in range(n)], 1)
        for side, x in enumerate((P, Q))
    )
    U = [read(model.core_layers[0], attend(model.attend, all_p, all_q))]
    U.append(read(model.core_layers[1], attend(model.attend_self, U[0], U[0])))
    M = [U[1]]
    for k in range(2):
        M += [connect(model.core_connectors[k][j], U[k], Q[j])[0] for j in range(n)]
    start = read(model.pointer_layers[0], torch.cat(M, 1))
    end = read(model.pointer_layers[1], start)
    return (
        torch.stack([start @ model.W_pointer[0], end @ model.W_pointer[1]])
        + model.b_pointer[:, None]
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_those_of_the_literal_sections(config):
    model, (passages, questions) = build(config), texts()
    with torch.no_grad():
        logits = model(passages, questions)
        for i, passage in enumerate(passages):
            tokens = [[t for t in text.tolist() if t != PAD] for text in (passage, questions[i])]
            expected = literal(model, *tokens)
            torch.testing.assert_close(logits[i, :, : len(tokens[0])], expected)
            assert (logits[i, :, len(tokens[0]) :] == -torch.inf).all()


def test_the_passage_attends_to_itself_with_softmax():
    _, cache = build(CODA).run_with_cache(*texts())
    pattern = cache["attend_self.align.hook_pattern"][0, 0]
    torch.testing.assert_close(pattern.sum(-1), torch.ones(5).double())
    of_question = cache["attend.align.hook_pattern"][0, 0].sum(-1)
    assert ((of_question - 1).abs() > 0.01).all()
    assert cache["core_connectors.1.0.hook_features_a"].shape == (3, 5, 3)


def test_hook_points_of_passage_and_question_are_apart():
    model, (passages, questions) = build(SOFTMAX), texts()
    expected = model(passages, questions)
    model.set_positions(6, 3)
    with model.hooks(fwd_hooks=[("question_layers.0.steps.0.hook_cell", lambda x, hook: x + 1)]):
        changed = model(passages, questions)
    finite = expected.isfinite()
    assert not torch.allclose(changed[finite], expected[finite])
    assert "question_layers.0.steps.3.hook_cell" not in model.hook_dict
    assert "passage_layers.1.backward_steps.5.hook_hidden" in model.hook_dict


@pytest.mark.parametrize("config", [SOFTMAX, CODA], ids=["softmax", "coda"])
def test_padding_has_no_effect_and_an_empty_question_is_allowed(config):
    model, (passages, questions) = build(config), texts()
    wider = [torch.cat([x, torch.full((3, 2), PAD)], 1) for x in (passages, questions)]
    torch.testing.assert_close(model(*wider)[..., :5], model(passages, questions))
    logits = model(passages, torch.full_like(questions, PAD))
    logits.masked_fill(logits.isneginf(), 0.0).square().sum().backward()
    assert logits.isfinite().any(-1).all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_dropout_acts_in_training_only():
    config = replace(CODA, dropout=0.5, alignment=replace(CODA.alignment, dropout=0.5))
    model, same = build(config), build(CODA)
    torch.testing.assert_close(model(*texts()), same(*texts()))
    assert not torch.equal(model.train()(*texts()), same(*texts()))


def test_weights_follow_from_the_seed_and_are_saved(tmp_path):
    check_seed_determines_weights(lambda generator: DecaProp(CODA, generator=generator))
    check_saved_model_loads(build(CODA), texts(), tmp_path)


@pytest.mark.parametrize(("name", "value"), [("n_layers", 0), ("n_factors", 0), ("dropout", 1.0)])
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        replace(SOFTMAX, **{name: value})
