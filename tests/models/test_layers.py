import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evenload.models import DenseFFN, RMSNorm, swiglu


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.equal(swiglu(x), F.silu(x[..., :4]) * x[..., 4:])
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_rms_norm_is_computed_in_float32() -> None:
    norm = RMSNorm(64).to(torch.bfloat16)
    x = (1000 * torch.randn(4, 64)).to(torch.bfloat16)
    expected = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected.to(torch.bfloat16))


def test_rms_norm_ignores_scale() -> None:
    x = torch.randn(4, 16, dtype=torch.float64)
    norm = RMSNorm(16, eps=1e-12)
    torch.testing.assert_close(norm(7 * x), norm(x))


@pytest.mark.parametrize("shape", [(6,), (2, 6), (0, 6), (2, 3, 6)])
def test_dense_ffn_takes_any_leading_shape(shape: tuple[int, ...]) -> None:
    ffn = DenseFFN(6, 10)
    x: Tensor = torch.randn(shape, requires_grad=True)
    out = ffn(x)
    assert out.shape == shape
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
