from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule

from probes import interchange_codes, interchange_pairs, latent_code
from tests.probes.interventions.test_interchange import Block

N, N_POS = 60, 4


class Reader(HookedRootModule):
    """Inputs [example, 3] in 0..9. Layer 0 attends by the first two, with the weight 0.

    Of layer 1, the answer is entry (3, 1) of head 0, plus 10 times entry (3, 2), plus 100 times
    entry (0, 0): the code of query 3 to key 1, another key of its row, another query.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.setup()

    def forward(self, x):
        pattern = torch.zeros(len(x), 1, N_POS, N_POS)
        pattern[:, 0, 3, 1], pattern[:, 0, 3, 2], pattern[:, 0, 0, 0] = x.float().unbind(1)
        unused = self.blocks[0].attn.hook_pattern(pattern)
        used = self.blocks[1].attn.hook_pattern(pattern + 0 * unused)[:, 0]
        return (used[:, 3, 1] + 10 * used[:, 3, 2] + 100 * used[:, 0, 0]).long()


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(10, (N, 3), generator=generator)
    return base, (base + 1) % 10


def answer_of(*digits):
    return sum(10**place * digit for place, digit in enumerate(digits))


def patched(base, source, **changes):
    a, b = base.unbind(1), source.unbind(1)
    arguments = {
        "query": torch.full((N,), 3),
        "keys": torch.full((N, 1), 1),
        "n_pos": N_POS,
        "answer": lambda output: output,
        "outcomes": {
            "nothing": answer_of(*a),
            "code": answer_of(b[0], a[1], a[2]),
            "row": answer_of(b[0], b[1], a[2]),
            "pattern": answer_of(*b),
        },
    }
    return interchange_codes(Reader(), base, source, **(arguments | changes))


def test_each_scope_writes_its_own_entries(pairs):
    rate = patched(*pairs)["rate"]
    assert rate.dims == ("scope", "site", "outcome")
    assert rate["site"].to_numpy().tolist() == ["none", "layer 0", "layer 1", "all layers"]
    for scope in ("code", "row", "pattern"):
        for site in ("layer 1", "all layers"):
            met = rate.sel(scope=scope, site=site)
            assert {str(one): float(met.sel(outcome=one)) for one in met["outcome"].values} == {
                name: float(name == scope) for name in ("nothing", "code", "row", "pattern")
            }
        # The code of layer 0 says as much, but nobody listens.
        assert (rate.sel(scope=scope, site=["none", "layer 0"], outcome="nothing") == 1).all()


def test_every_example_has_a_query_of_its_own(pairs):
    query = torch.tensor([3, 0]).repeat(N // 2)
    hit = patched(*pairs, query=query)["hit"].sel(scope="code", site="layer 1")
    # Query 0 to key 1 is an entry that nobody uses.
    assert hit.sel(outcome="code").to_numpy().tolist() == [1, 0] * (N // 2)
    assert hit.sel(outcome="nothing").to_numpy().tolist() == [0, 1] * (N // 2)


class Padded(Reader):
    """The same of inputs with as many columns as the pattern has tokens; the last is not seen."""

    def forward(self, x):
        return super().forward(x[:, :3])


def conditions_of(base, source):
    """Pairs of other codes, and of the same; the first outcome is that of the source's code."""
    result = {}
    for name, other in (("other", source), ("same", base)):
        a, b = base.unbind(1), other.unbind(1)
        result[name] = SimpleNamespace(
            base=torch.cat([base, base[:, :1]], 1),
            source=torch.cat([other, other[:, :1]], 1),
            query=torch.full((N,), 3),
            keys=torch.full((N, 1), 1),
            answers={"source's": answer_of(b[0], a[1], a[2]), "base's": answer_of(*a)},
        )
    return result


def test_pairs_of_every_condition_are_patched_by_themselves(pairs):
    result = interchange_pairs(Padded(), conditions_of(*pairs), answer=lambda output: output)
    assert result["rate"].dims == ("condition", "scope", "site", "outcome")
    assert "hit" not in result
    code = result["rate"].sel(scope="code")
    for site, exchanged in (("none", 0), ("layer 0", 0), ("layer 1", 1), ("all layers", 1)):
        other = code.sel(condition="other", site=site)
        assert other.to_numpy().tolist() == [exchanged, 1 - exchanged]
    # A source with the same code changes nothing.
    assert (code.sel(condition="same") == 1).all()


def test_without_pairs_there_is_nothing_to_patch():
    with pytest.raises(ValueError, match="pairs must name at least one condition"):
        interchange_pairs(Padded(), {}, answer=lambda output: output)


def test_codes_are_read_at_their_queries_and_keys():
    """Entry [h, q, k] of the pattern is its own address."""
    n_heads, n_pos = 3, 18
    pattern = torch.arange(2 * n_heads * n_pos**2).view(2, n_heads, n_pos, n_pos)
    query, keys = torch.tensor([16, 17]), torch.tensor([[12, 14], [13, 15]])
    quantity = latent_code(query, keys, dims=("feature", "key"))
    assert quantity.dims == ("example", "feature", "key", "head")
    code = quantity.reduce(pattern)
    assert code.shape == (2, 2, 2, n_heads)
    for place in np.ndindex(*code.shape):
        example, asked, key, head = place
        assert code[place] == pattern[example, head, query[asked], keys[asked, key]]


def test_bad_positions_are_refused(pairs):
    with pytest.raises(ValueError, match="one row per query"):
        latent_code(torch.arange(2), torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="dims must name two dims"):
        latent_code(torch.arange(2), torch.zeros(2, 2, dtype=torch.long), dims=("feature",))
    with pytest.raises(ValueError, match="query must have 60 entries"):
        patched(*pairs, query=torch.tensor([3]), keys=torch.tensor([[1]]))
    with pytest.raises(KeyError, match="hook_pattern"):
        patched(*pairs, hook="blocks.*.hook_scores")
