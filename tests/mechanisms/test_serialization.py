import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import save_file
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms import AttentionConfig, Transformer, check, load, save
from tests.contracts.models import MODELS
from tests.contracts.models import build as build_model
from tests.mechanisms.models.test_transformer import CONFIGS, build, inputs_for
from tests.mechanisms.ndr_golden import VARIANTS, router


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_is_loaded_with_its_config_and_outputs(name, tmp_path):
    model = build(CONFIGS[name])
    save(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert isinstance(loaded, Transformer)
    assert loaded.config == model.config
    assert not loaded.training
    inputs = inputs_for(model.config)
    assert torch.allclose(loaded(inputs), model(inputs), atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class OwnConfig(AttentionConfig):
    """A config that `mechanisms` does not export."""


def of_own(model_class=Transformer, attention=OwnConfig):
    config = replace(next(iter(CONFIGS.values())), attention=attention(n_heads=2, d_head=4))
    return model_class(config, generator=torch.Generator().manual_seed(0)).eval()


class Doubled(Transformer):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


# A class of one's own may have the name of one of ours.
SAME_NAME = type("Transformer", (Doubled,), {})


@pytest.mark.parametrize(
    ("model", "classes"),
    [
        (of_own(), (OwnConfig,)),
        (of_own(Doubled, AttentionConfig), (Doubled,)),
        (of_own(SAME_NAME, AttentionConfig), (SAME_NAME,)),
        (of_own(SAME_NAME), (SAME_NAME, OwnConfig)),
    ],
    ids=["attention", "model", "same name", "both"],
)
def test_classes_of_ones_own_are_passed_to_load(model, classes, tmp_path):
    save(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors", classes=classes)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    inputs = inputs_for(model.config)
    assert torch.equal(loaded(inputs), model(inputs))
    check(model, inputs)
    names = "|".join(one.__name__ for one in classes)
    with pytest.raises(ValueError, match=rf"class must be exported.*\.({names})' and classes=\(\)"):
        load(tmp_path / "model.safetensors")


@dataclass(frozen=True)
class PlainConfig:
    d_model: int = 4


class Tied(HookedRootModule):
    """Encodes and decodes by one matrix."""

    def __init__(self, config):
        super().__init__()
        self.config, self.hook_code = config, HookPoint()
        self.encode = torch.nn.Linear(config.d_model, config.d_model, bias=False)
        self.decode = torch.nn.Linear(config.d_model, config.d_model, bias=False)
        self.decode.weight = self.encode.weight
        self.setup()

    def forward(self, inputs):
        return self.decode(self.hook_code(self.encode(inputs)))


class WithoutWeights(HookedRootModule):
    def __init__(self, config):
        super().__init__()
        self.config, self.hook_double = config, HookPoint()
        self.setup()

    def forward(self, inputs):
        return self.hook_double(2 * inputs)


def test_weights_that_several_parameters_share_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match=r"must not share memory.*decode\.weight"):
        save(Tied(PlainConfig()), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    check(Tied(PlainConfig()), torch.randn(3, 4))


def test_a_saved_model_can_be_read_by_whoever_reads_other_files(tmp_path):
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    other.touch()
    save(WithoutWeights(PlainConfig()), path)
    assert path.stat().st_mode == other.stat().st_mode


def test_a_model_without_weights_is_saved(tmp_path):
    save(WithoutWeights(PlainConfig()), tmp_path / "model.safetensors")
    own = (WithoutWeights, PlainConfig)
    loaded = load(tmp_path / "model.safetensors", classes=own)
    assert torch.equal(loaded(torch.ones(2, 4)), torch.full((2, 4), 2.0))
    check(WithoutWeights(PlainConfig()), torch.randn(3, 4))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_router_is_loaded_with_its_config_and_outputs(variant, tmp_path):
    model = router(**VARIANTS[variant]).eval()
    save(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    tokens = torch.tensor([[1, 2, 3], [5, 0, -1]])
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_precision(name, dtype, tmp_path):
    config, inputs = MODELS[name]
    model = build_model(config).to(dtype).eval()
    save(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    kept, expected = ({n: b.dtype for n, b in m.named_buffers()} for m in (loaded, model))
    assert kept == expected
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    logits = model(*inputs)
    assert logits.dtype == dtype
    assert torch.equal(loaded(*inputs), logits)


def test_a_failed_save_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save(build(CONFIGS["plain"]), path)
    before = path.read_bytes()

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("mechanisms.serialization.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(build(CONFIGS["plain"], seed=1), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError):
        load(path)
    save(build(CONFIGS["plain"]), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="must be a safetensors file"):
        load(path)
    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"must be a file that mechanisms\.save wrote"):
        load(path)
    foreign = {"class": "Transformer", "config": json.dumps({"class": "os.system"})}
    save_file({"w": torch.zeros(1)}, path, foreign)
    with pytest.raises(ValueError, match="class must be exported by mechanisms"):
        load(path)


@pytest.mark.parametrize("name", ["plain", "tied, shared, RMSNorm, SwiGLU"])
def test_precision_and_epsilons_are_restored(name, tmp_path):
    model = build(CONFIGS[name]).double()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
            module.eps = 0.1
    inputs = inputs_for(model.config)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    save(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float64}
    assert all(weight.requires_grad for weight in loaded.parameters())
    assert torch.equal(loaded(inputs), model(inputs))


def test_models_without_a_config_of_their_own_are_not_saved(tmp_path):
    attention = build(CONFIGS["plain"]).blocks[0].attn
    with pytest.raises(TypeError, match=r"got MultiHeadAttention, which also needs d_model: save"):
        save(attention, tmp_path / "attention.safetensors")
    with pytest.raises(TypeError, match="must be built from its config alone, got Linear"):
        save(torch.nn.Linear(2, 2), tmp_path / "linear.safetensors")
    assert not list(tmp_path.iterdir())
