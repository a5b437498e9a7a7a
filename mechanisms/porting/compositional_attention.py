"""Models trained with the published code of "Compositional Attention" (Mittal et al. 2021).

The code (github.com/sarthmit/Compositional-Attention) is written with torch; each folder has an
attention of its own. The functions here take a state dict of one of its modules and return a module
with the same function, in evaluation mode. Weights keep their precision; models in float64 agree to
1e-9. Numbers of searches and retrievals and all widths follow from the weights.

Names and layouts, theirs and ours. Their linear maps are [out, in], with rows [head, width]:

- `query_net`, `key_net`, `value_net`, in fairseq `q_proj`, `k_proj`, `v_proj`: `W_Q`, `b_Q`, ...
  [head, d_model, width]
- `value_query`, also `query_value_net` or `value_q`: `W_value_query`, `b_value_query`
- `value_key`, also `key_value_net` or `value_k`: `W_value_key` [d_value, d_selection]; separate
  ones (`value_key.w`, `value_key.b`) [retrieval, d_value, d_selection]
- `score_network` [1, d_selection + d_value]: `W_score`. The value query is first, in fairseq last.
- `in_`, with `concat`: `W_own`, `b_own`
- `out_proj`, also `final` or `multi_head_merge`, columns [search, d_value], then the own value:
  `W_O` [search, d_value, d_model]; with `nonlinear` `out_proj.0`, and `out_proj.2`: `W_O2`
- `norm1`, `norm2`: `ln1`, `ln2`; `res.0`, `res.3`, in SCAN `linear1`, `linear2`: `mlp`
- contextual retrieval: `encoder.0`, `encoder.2`: `W_in`, `W_E`; `model`: `blocks.0.attn`;
  `decoder.0`, `decoder.2`: `W_hidden`, `W_U`
- Sort-of-CLEVR and triangles: `encoder.patch_embeddings` [d_token, channel, y, x]: `W_E`;
  `encoder.cls_token`: `cls`; `encoder.question_representation`: `W_condition`; `mapping`:
  `W_join`; `transformer`, shared by all steps: `core`; `final`: `W_U`
- relations of images: `encoder.conv1` to `conv3`, `fc1`, `fc2`: `encoder.W_conv`, `W_in`, `W_out`;
  `gamma`, `beta`: `normalization.gain`, `shift`; `transformer_encoder`: `blocks.0`;
  `encoder_norm`: `ln_final`; `out_hidden`, `y_out`: `W_hidden`, `W_U`

Conventions of their models:

- Their masks are True where a key is hidden, ours where it may be attended to. In contextual
  retrieval an object never attends to itself. fairseq has positions before examples.
- Inputs of contextual retrieval are those of our task: search features, retrieval features, and
  the one-hot preferences, the first search's first.
- Sort-of-CLEVR: blue, green and red from 0 to 1, columns before rows
  (`published_sort_of_clevr_images`); questions as ours: the first colour, the second one, the type
  and the subtype, one-hot. Ternary counts are one class later (`published_sort_of_clevr_answers`).
  What is not alike: a ternary `line` is a band of 12 pixels above and below, and the middle line is
  left and above. Their outputs are log-softmaxed.
- Triangles: points have the value 255 (`published_triangle_images`), and class 1 is not
  equilateral; the logit is that of class 1.
- Relations: images [batch, image, y, x] from 0 to 1; ours have a dim for the channel. Of two
  objects, class 0 is the same one.
- SCAN: ids are alphabetical (`published_word_ids`); then the source has EOS and BOS, the target one
  id for both.
- Sinusoids are float32, also if all else is computed in float64.

Not covered: `gumbel`, which also samples in evaluation, and all patterns; in fairseq `q_compose`,
`nonlinear` and `add_bias_kv`; the network of several image sets, whose patches see the class tokens
of all tasks; relations without context normalisation, with a class token (`separate`), with more
than one layer or with another encoder; the models of SCAN and fairseq as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechanisms.attention.compositional import CompositionalAttention
from mechanisms.attention.multi_head import MultiHeadAttention
from mechanisms.models.patch_transformer import PatchTransformer, PatchTransformerConfig
from mechanisms.models.relation_classifier import (
    N_CONVOLUTIONS,
    N_FILTERS,
    RelationClassifier,
    RelationClassifierConfig,
)
from mechanisms.models.retrieval_network import RetrievalNetwork, RetrievalNetworkConfig
from mechanisms.models.transformer import Block, TransformerConfig
from mechanisms.porting.compositional_layers import (
    NORM_EPSILON,
    read_attention,
    read_block,
    read_maps,
)
from mechanisms.porting.weights import PublishedWeights, read_norm


def compositional_attention_from_torch(
    state: Mapping[str, Tensor], *, n_heads: int | None = None
) -> CompositionalAttention | MultiHeadAttention:
    """The attention with these weights, of any folder of the code.

    Args:
        state: the state dict of an attention, for example a `Compositional_dot_Transformer`, or of
            the multi-head baseline beside it, such as a `Transformer`.
        n_heads: number of heads of multi-head attention; None if there is an own value, whose width
            shows it, and for compositional attention.

    Raises:
        ValueError: a weight is missing, unknown or has the wrong shape; or `n_heads` is missing or
            not that of the weights.

    Example:
        >>> attention = compositional_attention_from_torch(their_attention.state_dict())
        >>> attention.config.n_searches, attention.config.n_retrievals
        (4, 2)
        >>> attention(x, x).shape
        torch.Size([2, 5, 16])
    """
    source = PublishedWeights(state)
    config, weights, d_model = read_attention(source, n_heads)
    return source.load_into(config.build(d_model, generator=torch.Generator()), weights)  # pyright: ignore[reportReturnType]


def compositional_block_from_torch(
    state: Mapping[str, Tensor], *, post_norm: bool, n_heads: int | None = None
) -> Block:
    """The block with these weights.

    Args:
        state: the state dict of a `Compositional_Self_Attention` or `Self_Attention`, which have
            norms and feed-forward layer, or of a `CompTransformerEncoderLayer` of SCAN.
        post_norm: whether the norms come after the sums, as in the networks of relations and SCAN;
            those of Sort-of-CLEVR and triangles have them before.
        n_heads: as for `compositional_attention_from_torch`.

    Raises:
        ValueError: as for `compositional_attention_from_torch`.

    Example:
        >>> block = compositional_block_from_torch(their_block.state_dict(), post_norm=True)
        >>> torch.equal(block.mlp.W_in.T, their_block.state_dict()["res.0.weight"])
        True
    """
    source = PublishedWeights(state)
    settings, weights = read_block(source, n_heads)
    # A block does not depend on the other sizes of a model.
    config = TransformerConfig(**settings, d_input=1, d_output=1, n_layers=1, positions="none")
    block = Block(
        config, norm_epsilon=NORM_EPSILON, post_norm=post_norm, generator=torch.Generator()
    )
    return source.load_into(block, weights)


def retrieval_network_from_torch(
    state: Mapping[str, Tensor], *, n_heads: int | None = None
) -> RetrievalNetwork:
    """The network of contextual retrieval with these weights.

    Args:
        state: the state dict of the `Model` of their contextual retrieval.
        n_heads: as for `compositional_attention_from_torch`.

    Raises:
        ValueError: as for `compositional_attention_from_torch`.

    Example:
        >>> model = retrieval_network_from_torch(their_network.state_dict())
        >>> model(torch.randn(3, 10, 14)).shape  # [batch, object, d_output]
        torch.Size([3, 10, 1])
    """
    source = PublishedWeights(state)
    d_mlp, d_input = source.sizes("encoder.0.weight", "d_mlp", "d_input")
    d_output, _ = source.sizes("decoder.2.weight", "d_output", "d_mlp")
    attention, weights, d_model = read_attention(source.below("model."), n_heads)
    weights = {f"blocks.0.attn.{name}": weight for name, weight in weights.items()}
    maps = {"in": ("encoder.0", d_mlp, d_input), "E": ("encoder.2", d_model, d_mlp)}
    maps |= {"hidden": ("decoder.0", d_mlp, d_model), "U": ("decoder.2", d_output, d_mlp)}
    weights |= read_maps(source, maps)
    config = RetrievalNetworkConfig(
        d_input=d_input, d_output=d_output, d_model=d_model, d_mlp=d_mlp, attention=attention
    )
    return source.load_into(RetrievalNetwork(config, generator=torch.Generator()), weights)


def patch_transformer_from_torch(
    state: Mapping[str, Tensor], *, image_size: int, n_steps: int, n_heads: int | None = None
) -> PatchTransformer:
    """The network of Sort-of-CLEVR, or of triangles, with these weights.

    Args:
        state: the state dict of the `Model` of their Sort-of-CLEVR or triangles.
        image_size: height and width of the images: there 75 and 64.
        n_steps: number of steps through the block (`iterations` there).
        n_heads: as for `compositional_attention_from_torch`.

    Raises:
        ValueError: as for `compositional_attention_from_torch`, or as for
            `PatchTransformerConfig`.

    Example:
        >>> state = their_image_network.state_dict()
        >>> model = patch_transformer_from_torch(state, image_size=75, n_steps=4)
        >>> images, questions = torch.rand(2, 3, 75, 75), torch.zeros(2, 18)
        >>> model(published_sort_of_clevr_images(images), questions).shape
        torch.Size([2, 1, 10])
    """
    source = PublishedWeights(state)
    patches, question = "encoder.patch_embeddings", "encoder.question_representation"
    d_token, *patch = source.sizes(f"{patches}.weight", "d_token", "channel", "y", "x")
    d_condition = None
    if f"{question}.weight" in source:
        _, d_condition = source.sizes(f"{question}.weight", "d_token", "d_condition")
    d_output, _ = source.sizes("final.weight", "d_output", "d_model")
    settings, block = read_block(source.below("transformer."), n_heads)
    d_model = settings["d_model"]
    config = PatchTransformerConfig(
        **settings,
        image_size=image_size,
        patch_size=patch[1],
        n_channels=patch[0],
        d_output=d_output,
        n_layers=n_steps,
        d_condition=d_condition,
        condition="beside",
        positions="fast_sinusoidal",
        final_norm=False,
        norm_epsilon=NORM_EPSILON,
    )
    weights = {f"core.{name}": weight for name, weight in block.items()}
    weights["W_E"] = source.take(f"{patches}.weight", d_token, *patch).flatten(1).T
    weights["b_E"] = source.take(f"{patches}.bias", d_token)
    weights["cls"] = source.take("encoder.cls_token", 1, 1, d_token)[0, 0]
    if d_condition is not None:
        maps = {"condition": (question, d_token, d_condition)}
        weights |= read_maps(source, maps | {"join": ("mapping", d_model, 2 * d_token)})
    readout = read_maps(source, {"U": ("final", d_output, d_model)})
    weights |= {name: weight[None] for name, weight in readout.items()}
    return source.load_into(PatchTransformer(config, generator=torch.Generator()), weights)


def relation_classifier_from_torch(
    state: Mapping[str, Tensor],
    *,
    windows: tuple[int, ...] | None = None,
    n_heads: int | None = None,
) -> RelationClassifier:
    """The network of relations between images with these weights.

    Args:
        state: the state dict of the `Model` of `comp_tsf` or `tsf`, with one layer and context
            normalisation.
        windows: numbers of successive images that are normalised together (`task_seg` there, with
            `tasksegmented_contextnorm`); None for all images.
        n_heads: as for `compositional_attention_from_torch`.

    Raises:
        ValueError: as for `compositional_attention_from_torch`, or as for
            `RelationClassifierConfig`.

    Example:
        >>> state = their_relation_network.state_dict()
        >>> model = relation_classifier_from_torch(state, windows=(2, 2, 2))
        >>> model(torch.rand(3, 6, 16, 16)[:, :, None]).shape
        torch.Size([3, 1, 4])
    """
    source = PublishedWeights(state)
    d_hidden, d_flat = source.sizes("encoder.fc1.weight", "d_hidden", "features")
    d_output, d_readout = source.sizes("y_out.weight", "d_output", "d_hidden")
    settings, block = read_block(source.below("transformer_encoder."), n_heads)
    d_model = settings["d_model"]
    config = RelationClassifierConfig(
        **settings,
        d_output=d_output,
        image_size=2**N_CONVOLUTIONS * math.isqrt(d_flat // N_FILTERS),
        windows=windows,
    )
    weights = {f"blocks.0.{name}": weight for name, weight in block.items()}
    for i in range(N_CONVOLUTIONS):
        n_channels = N_FILTERS if i else 1
        name = f"encoder.conv{i + 1}"
        _, _, *kernel = source.sizes(f"{name}.weight", "filter", "channel", "y", "x")
        weights[f"encoder.W_conv.{i}"] = source.take(
            f"{name}.weight", N_FILTERS, n_channels, *kernel
        )
        weights[f"encoder.b_conv.{i}"] = source.take(f"{name}.bias", N_FILTERS)
    encoder = {"in": ("fc1", d_hidden, d_flat), "out": ("fc2", d_model, d_hidden)}
    found = read_maps(source.below("encoder."), encoder)
    weights |= {f"encoder.{name}": weight for name, weight in found.items()}
    weights["normalization.gain"] = source.take("gamma", d_model)
    weights["normalization.shift"] = source.take("beta", d_model)
    weights |= read_norm(source, "encoder_norm", "ln_final", d_model)
    readout = {"hidden": ("out_hidden", d_readout, d_model), "U": ("y_out", d_output, d_readout)}
    weights |= read_maps(source, readout)
    source.skip("pos_encoder.pe")
    return source.load_into(RelationClassifier(config, generator=torch.Generator()), weights)


def published_sort_of_clevr_images(
    images: Float[Tensor, "batch 3 height width"],
) -> Float[Tensor, "batch 3 width height"]:
    """The images of our task as their networks read them: blue first, and columns before rows.

    Example:
        >>> image = torch.zeros(1, 3, 75, 75)
        >>> image[0, 0, 10, 20] = 1  # red, in row 10 and column 20
        >>> published_sort_of_clevr_images(image).nonzero()
        tensor([[ 0,  2, 20, 10]])
    """
    return images.flip(1).mT


def published_sort_of_clevr_answers(
    targets: Int[Tensor, "batch 1"], questions: Float[Tensor, "batch 18"]
) -> Int[Tensor, "batch 1"]:
    """The targets of our task as their classes.

    Classes 4 to 9 are counts, in ternary questions counts from 0, which for us is "no" (class 1)
    and for which 1 is class 4. All others are alike, but what a ternary `line` means is not.

    Example:
        >>> questions = torch.zeros(2, 18)
        >>> questions[1, 14] = questions[1, 15] = 1  # ternary, asks for a count
        >>> published_sort_of_clevr_answers(torch.tensor([[1], [1]]), questions).tolist()
        [[1], [4]]
    """
    is_ternary, is_line = questions[:, 14, None] == 1, questions[:, 16, None] == 1
    counts = torch.where(targets == 1, 4, targets + 1)
    return torch.where(is_ternary & ~is_line, counts, targets)


def published_triangle_images(
    images: Float[Tensor, "batch 1 height width"],
) -> Float[Tensor, "batch 1 height width"]:
    """The images of our task with their values: 255 at points, else 0.

    Example:
        >>> published_triangle_images(torch.eye(2)[None, None])[0, 0]
        tensor([[255.,   0.],
                [  0., 255.]])
    """
    return 255 * images


def published_word_ids(words: Iterable[str]) -> dict[str, int]:
    """The id of each word of a vocabulary of theirs (SCAN): they are numbered alphabetically.

    Example:
        >>> ids = published_word_ids(["walk", "jump"])
        >>> ids["jump"] < ids["walk"]
        True
    """
    return {word: number for number, word in enumerate(sorted(set(words)))}
