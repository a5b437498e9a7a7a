"""Models without hooks: plain torch modules, and models of transformers built from configs."""

from dataclasses import make_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import xarray as xr
from torch import nn

import probes
from probes import Quantity, capture, decode, hooked, interchange

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, intermediate_size=32, vocab_size=30)
    return transformers.BertModel(config).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def tokens(n=6, n_pos=5):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (n, n_pos), generator=generator)
    lengths = torch.arange(n) % 3 + 3
    mask = (torch.arange(n_pos) < lengths[:, None]).long()
    # As a tokenizer returns them.
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})


def batch_of(inputs, **latents):
    return SimpleNamespace(inputs=inputs, latents=latents)


OUT = Quantity("encoder.layer.*.hook_out", ("example", "pos", "d_model"))


def test_hooks_show_what_hugging_face_returns():
    model, inputs = bert(), tokens()
    data = capture(
        hooked(model),
        [batch_of(inputs)],
        {"out": OUT, "last": Quantity(None, ("example", "pos", "d_model"))},
    )
    expected = model(**inputs, output_hidden_states=True)
    for layer in range(2):
        shown = data["out"].sel(layer=layer).to_numpy()
        np.testing.assert_array_equal(shown, expected.hidden_states[1 + layer].detach().numpy())
    np.testing.assert_array_equal(data["last"], expected.last_hidden_state.detach().numpy())


def test_inputs_of_modules_are_shown_too():
    data = capture(
        hooked(encoder()),
        [batch_of(torch.ones(2, 3, 16))],
        {
            "first": Quantity("layers.0.hook_out", ("example", "pos", "d_model")),
            "second": Quantity("layers.1.hook_in", ("example", "pos", "d_model")),
        },
    )
    np.testing.assert_array_equal(data["first"], data["second"])


def test_the_module_itself_stays_as_it_is():
    model, inputs = gpt2(), tokens()
    before = model(**inputs).logits
    names = {name: dict(vars(module)) for name, module in model.named_modules()}
    view = hooked(model)
    hook = "transformer.h.0.hook_out"
    zeros = view.run_with_hooks(**inputs, fwd_hooks=[(hook, lambda value, hook: value * 0)])
    assert not torch.equal(zeros, before)
    assert torch.equal(view(**inputs), before)
    assert torch.equal(model(**inputs).logits, before)
    for name, module in model.named_modules():
        assert vars(module).keys() == names[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert [*map(id, view.parameters())] == [*map(id, model.parameters())]


@pytest.mark.parametrize("side", ["hook_in", "hook_out"])
@pytest.mark.parametrize(
    ("build", "hook"), [(gpt2, "transformer.h.1"), (gpt2, "transformer.h.1.attn")]
)
def test_what_a_hook_returns_replaces_the_activation(build, hook, side):
    """An output may be a tensor or a tuple; an input may be an argument or a keyword."""
    model, inputs = build(), tokens()
    point = f"{hook}.{side}"
    view = hooked(model)
    _, cache = view.run_with_cache(**inputs, names_filter=point)
    with torch.no_grad():
        same = view.run_with_hooks(**inputs, fwd_hooks=[(point, lambda x, hook: cache[point])])
        other = view.run_with_hooks(
            **inputs, fwd_hooks=[(point, lambda x, hook: x * torch.arange(16))]
        )
        torch.testing.assert_close(same, model(**inputs).logits)
    assert (other - same).abs().max() > 1e-3


def test_gradients_pass_through_hooks():
    model, inputs = gpt2(), tokens()
    point = "transformer.h.0.hook_out"
    shift = torch.zeros(16, requires_grad=True)
    output = hooked(model).run_with_hooks(**inputs, fwd_hooks=[(point, lambda x, hook: x + shift)])
    output.square().sum().backward()
    assert shift.grad.abs().sum() > 0


def test_interchange_on_a_plain_module():
    view = hooked(encoder())
    base, source = torch.randn(4, 3, 16), torch.randn(4, 3, 16)

    def answer(output):
        return output[:, 0].argmax(-1)

    right = answer(view(source))
    result = interchange(
        view, base, source, hooks={"first": "layers.0.hook_out"}, answer=answer,
        where=torch.ones(1, 1, 1, dtype=torch.bool), outcomes={"source": right},
    )  # fmt: skip
    # All of the stream is the source's.
    assert result["rate"].sel(site="first", outcome="source") == 1


def test_decoding_from_an_encoder_with_masked_pooling():
    model = hooked(bert())

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(4):
            inputs = tokens(60)
            inputs["input_ids"] = torch.randint(2, 30, (60, 5), generator=generator)
            label = torch.randint(2, (60,), generator=generator)
            inputs["input_ids"][:, 1] = label
            # Padding has other tokens, which say nothing but noise.
            yield batch_of(inputs, label=label)

    code = Quantity("encoder.layer.*.hook_out", ("example", "d_model"), probes.masked_mean())
    fit, test = (capture(model, batches(seed), {"code": code}) for seed in range(2))
    found = decode(fit, {"t": test}, label="label")["score"].sel(metric="accuracy", split="t")
    assert (found.sel(control="probe", layer=["0", "1"]) > 0.9).all()
    assert (found.sel(control="shuffled") < 0.65).all()


def test_arguments_are_passed_on():
    inputs = tokens()
    with torch.no_grad():
        output = hooked(bert(), output_attentions=True).model(**inputs, output_attentions=True)
    assert output.attentions is not None
    assert hooked(gpt2(), use_cache=False)(**inputs).shape == (6, 5, 30)


def test_unknown_hooks_are_named_with_the_nearest():
    absent = Quantity("layer.0.hook_out", ("example",))
    with pytest.raises(KeyError, match=r"encoder.layer.0.hook_out"):
        capture(hooked(bert()), [batch_of(tokens())], {"a": absent})
    with pytest.raises(TypeError, match=r"^model of hooked must be Module, got str 'bert'$"):
        hooked("bert")


def looped(h_cycles=2, l_cycles=3):
    torch.manual_seed(0)
    config = transformers.HrmTextConfig(
        **SMALL, intermediate_size=32, vocab_size=30, H_cycles=h_cycles, L_cycles=l_cycles,
        max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    return transformers.HrmTextForCausalLM(config).eval()


def test_the_states_of_a_looped_model_are_its_steps():
    model = hooked(looped(), use_cache=False)
    quantities = {
        name: Quantity(f"model.{name}_module.hook_out", ("example", "pos", "d"), fires="each")
        for name in "HL"
    }
    batch = batch_of({"input_ids": tokens()["input_ids"]})
    high, low = (capture(model, [batch], {"state": one})["state"] for one in quantities.values())
    assert high.sizes["step"] == 2
    assert low.sizes["step"] == 6
    # The read-out is of the last state of the upper module.
    expected = model.model.lm_head(torch.from_numpy(high.isel(step=-1).to_numpy()))
    torch.testing.assert_close(model(**batch.inputs), expected)


def test_a_later_state_in_an_earlier_step_of_a_looped_model():
    model = hooked(looped(), use_cache=False)
    base, source = ({"input_ids": ids} for ids in torch.randint(1, 30, (2, 4, 5)))
    last = probes.At("model.H_module.hook_out", step=1)
    result = interchange(
        model, base, source, hooks={"last": last}, answer=lambda logits: logits[:, -1].argmax(-1),
        where=torch.ones(1, 1, 1, dtype=torch.bool),
        outcomes={"source": model(**source)[:, -1].argmax(-1)},
    )  # fmt: skip
    assert result["rate"].sel(site="last", outcome="source") == 1


def test_control_flow_of_a_looped_model_without_gates():
    """State changes and attention of a model of transformers, by step."""
    model = hooked(looped(), use_cache=False)
    ids = tokens()["input_ids"]
    layer = "model.L_module.layers.0"
    columns = probes.capture_control_flow(
        model, [batch_of({"input_ids": ids})], answer=lambda logits: logits[:, -1].argmax(-1),
        gates=None, attention=f"{layer}.self_attn.hook_out_1",
        before=f"{layer}.hook_in", after=f"{layer}.hook_out",
    )  # fmt: skip
    assert columns["attention"].dims == ("example", "step", "head", "query_pos", "key_pos")
    assert dict(columns.sizes) == {
        "example": 6, "step": 6, "pos": 5, "head": 2, "query_pos": 5, "key_pos": 5
    }  # fmt: skip
    np.testing.assert_allclose(columns["attention"].sum("key_pos"), 1, rtol=1e-5)
    assert ((columns["change"] > 0) & (columns["change"] <= 1)).all()
    valid = xr.DataArray(np.ones((6, 5), dtype=bool), dims=("example", "pos"))
    graphs = probes.extract_control_flow(
        columns["change"], columns["attention"], valid,
        gate_threshold=float(columns["change"].median()), attention_threshold=0.3,
    )  # fmt: skip
    graph = probes.to_networkx(graphs, 0)
    assert graph.number_of_nodes() > 5
    # The attention weights are a copy that the module returns.
    readout = xr.DataArray(np.full(6, 4), dims="example")
    with pytest.raises(
        ValueError, match=r"read downstream, got .model.L_mod.*self_attn.hook_out_1'"
    ):
        probes.cut(
            model, {"input_ids": ids}, graphs, readout=readout, targets=torch.zeros(6).long(),
            gates=(f"{layer}.hook_in", f"{layer}.hook_out"),
            attention=f"{layer}.self_attn.hook_out_1",
            answer=lambda logits: logits[:, -1].argmax(-1),
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="silent"):
        capture(
            model,
            [batch_of({"input_ids": ids})],
            {"none": Quantity(f"{layer}.mlp.hook_out_1", ("example", "pos", "d"))},
        )


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SMALL, intermediate_size=32, vocab_size=30, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


@pytest.mark.parametrize("n", [1, 6])
def test_routers_of_experts_are_by_example_and_position(n):
    model, ids = mixtral(), tokens(n)["input_ids"]
    router = Quantity("model.layers.*.mlp.gate.hook_out", ("example", "pos", "expert"))
    data = capture(hooked(model), [batch_of({"input_ids": ids})], {"router": router})
    assert dict(data.sizes) == {"example": n, "layer": 2, "pos": 5, "expert": 4}
    logits = model(ids, output_router_logits=True).router_logits
    for layer in range(2):
        shown = data["router"].sel(layer=layer).to_numpy().reshape(-1, 4)
        expected = logits[layer].softmax(-1) if (shown >= 0).all() else logits[layer]
        np.testing.assert_allclose(shown, expected.detach().numpy(), rtol=1e-5)


class Positioned(nn.Module):
    """Adds embeddings of positions [pos, d_model], which are the same for all examples."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(30, 4), nn.Embedding(6, 4)

    def forward(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


def test_embeddings_of_positions_are_not_taken_for_examples():
    quantity = Quantity("positions.hook_out", ("example", "pos", "d_model"))
    ids = tokens(2, 6)["input_ids"]
    with pytest.raises(ValueError, match=r"must have the dims .* got \(6, 4\) from"):
        capture(hooked(Positioned()), [batch_of(ids)], {"positions": quantity})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": True}], ids=str)
def test_outputs_may_be_dataclasses(options):
    """Of a submodule and of the model, whose answer is the tensor `logits`."""
    names = ["hidden", ("mask", object, None), ("logits", object, None)]
    Out = make_dataclass("Out", names, **options)

    class Block(nn.Module):
        def forward(self, x):
            return Out(2 * x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            hidden = self.block(x).hidden
            return Out(hidden, None, hidden + 1)

    x = torch.arange(6.0).reshape(3, 2)
    model = hooked(Model())
    codes = {"code": Quantity("block.hook_out", ("example", "d"))}
    data = capture(model, [batch_of(x)], codes | {"answer": Quantity(None, ("example", "logit"))})
    np.testing.assert_array_equal(data["code"], 2 * x)
    np.testing.assert_array_equal(data["answer"], 2 * x + 1)
    zeros = model.run_with_hooks(x, fwd_hooks=[("block.hook_out", lambda code, hook: 0 * code)])
    np.testing.assert_array_equal(zeros, torch.ones(3, 2))


def test_nested_tensors_are_refused_with_the_way_out():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential()
    model.encoder = nn.TransformerEncoder(layer, 2)
    padding = torch.arange(5) >= torch.tensor([5, 4, 3])[:, None]
    model.forward = lambda x: model.encoder(x, src_key_padding_mask=padding)
    kept = {"resid": Quantity("encoder.layers.*.hook_out", ("example", "pos", "d_model"))}
    batch = batch_of(torch.randn(3, 5, 16))
    with pytest.raises(ValueError, match=r"nested one at 'encoder\.layers\.0\.hook_out'"):
        capture(hooked(model), [batch], kept)
    model.encoder.use_nested_tensor = False
    assert capture(hooked(model), [batch], kept)["resid"].shape == (3, 2, 5, 16)
