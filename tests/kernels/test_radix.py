import torch

from evenload.kernels import bf16_key, bf16_unkey, dense_histogram, high_byte_histogram, low_byte_histogram

EVERY_BF16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
EVERY_NUMBER = EVERY_BF16[~EVERY_BF16.isnan()]


def test_keys_order_every_bf16_number():
    ordered = EVERY_NUMBER[bf16_key(EVERY_NUMBER).argsort()].float()
    assert (ordered[1:] >= ordered[:-1]).all()
    assert bf16_key(EVERY_NUMBER).unique().numel() == EVERY_NUMBER.float().unique().numel()
    assert bf16_key(EVERY_NUMBER).min() >= 0
    assert bf16_key(EVERY_NUMBER).max() <= 65535


def test_both_zeros_share_a_key():
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    assert bf16_key(zeros)[0] == bf16_key(zeros)[1]


def test_unkey_is_the_inverse():
    assert torch.equal(bf16_unkey(bf16_key(EVERY_NUMBER)), EVERY_NUMBER)


def test_histograms_count_bytes_column_by_column():
    keys = torch.randint(0, 65536, (500, 3), dtype=torch.int32)
    dense = dense_histogram(keys).view(3, 256, 256)
    assert torch.equal(high_byte_histogram(keys), dense.sum(dim=2, dtype=torch.int32))
    high = torch.tensor([0, 17, 255])
    keys[:50] = (high << 8 | 7).to(torch.int32)
    expected = dense_histogram(keys).view(3, 256, 256)[torch.arange(3), high]
    assert torch.equal(low_byte_histogram(keys, high), expected)
    assert expected[:, 7].min() >= 50


def test_no_rows():
    keys = torch.empty(0, 2, dtype=torch.int32)
    assert high_byte_histogram(keys).sum() == 0
    assert low_byte_histogram(keys, torch.tensor([1, 2])).shape == (2, 256)
