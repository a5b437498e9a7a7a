"""Sums and norms of a transformer block."""

from torch import Tensor, nn

from mechanisms.dropout import dropout


class ResidualBlock(nn.Module):
    """The base class of transformer blocks, whose parts f change the residual stream x in turn.

    x + f(norm(x)) (pre-LN, Xiong et al. 2020), or with `post_norm` norm(x + f(x)) (Vaswani et al.
    2017).

    Args:
        post_norm: whether the norms come after the sums.
        dropout: dropout probability of what a part adds to the stream.
    """

    def __init__(self, *, post_norm: bool, dropout: float):
        super().__init__()
        self.post_norm, self.dropout = post_norm, dropout

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The input of a part with this norm."""
        return x if self.post_norm else norm(x)

    def _after(self, norm: nn.Module, x: Tensor, part: Tensor) -> Tensor:
        """The stream after the output of a part with this norm is added."""
        x = x + dropout(part, self.dropout, self.training)
        return norm(x) if self.post_norm else x
